#include "store/digest.h"

#include <openssl/evp.h>

#include <cstring>

#include "kernels/base/check.h"

namespace stockpot {
namespace {

constexpr char kHexDigits[] = "0123456789abcdef";

// -1: no lower-case hex digit. Digests have one spelling.
int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string Digest::Hex() const {
  std::string hex(64, '0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    hex[2 * i] = kHexDigits[bytes[i] >> 4];
    hex[2 * i + 1] = kHexDigits[bytes[i] & 15];
  }
  return hex;
}

std::string Digest::ShortHex() const { return Hex().substr(0, 12); }

std::string_view Digest::raw() const {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<Digest> Digest::FromHex(std::string_view hex) {
  Digest digest;
  if (hex.size() != 64) return InvalidArgument("a digest has 64 hex digits");
  for (size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = HexValue(hex[2 * i]);
    const int low = HexValue(hex[2 * i + 1]);
    if (high < 0 || low < 0) return InvalidArgument("a digest has lower-case hex digits only");
    digest.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return digest;
}

Result<Digest> Digest::FromRaw(std::string_view raw) {
  Digest digest;
  if (raw.size() != digest.bytes.size()) {
    return InvalidArgument("a digest has 32 bytes, not " + std::to_string(raw.size()));
  }
  std::memcpy(digest.bytes.data(), raw.data(), raw.size());
  return digest;
}

size_t DigestHash::operator()(const Digest& d) const {
  uint64_t head;
  std::memcpy(&head, d.bytes.data(), sizeof head);
  return static_cast<size_t>(head);
}

Digest Sha256(std::span<const std::byte> data) {
  Digest digest;
  const int ok =
      EVP_Digest(data.data(), data.size(), digest.bytes.data(), nullptr, EVP_sha256(), nullptr);
  STOCKPOT_CHECK(ok == 1, data.size());
  return digest;
}

Digest Sha256(std::string_view data) {
  return Sha256(std::as_bytes(std::span(data.data(), data.size())));
}

struct Sha256Stream::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  bool finished = false;
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256Stream::Sha256Stream() : state_(std::make_unique<State>()) {
  STOCKPOT_CHECK(state_->context != nullptr);
  STOCKPOT_CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

Sha256Stream::~Sha256Stream() = default;

void Sha256Stream::Update(std::span<const std::byte> data) {
  STOCKPOT_CHECK(!state_->finished);
  STOCKPOT_CHECK(EVP_DigestUpdate(state_->context, data.data(), data.size()) == 1);
}

Digest Sha256Stream::Finish() {
  STOCKPOT_CHECK(!state_->finished);
  state_->finished = true;
  Digest digest;
  STOCKPOT_CHECK(EVP_DigestFinal_ex(state_->context, digest.bytes.data(), nullptr) == 1);
  return digest;
}

Digest TreeDigest(std::span<const Digest> chunks) {
  static_assert(sizeof(Digest) == 32);
  return Sha256(std::as_bytes(chunks));
}

}  // namespace stockpot
