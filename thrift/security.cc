#include "thrift/security.h"

#include <openssl/crypto.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <thrift/transport/TSSLSocket.h>

#include <fstream>

#include "store/digest.h"
#include "thrift/limits.h"
#include "thrift/wire.h"

namespace stockpot {
namespace {

using apache::thrift::transport::SSLTLS;
using apache::thrift::transport::TSSLSocketFactory;

// SSLTLS negotiates whatever both ends know; the floor is ours.
class Factory : public TSSLSocketFactory {
 public:
  Factory() : TSSLSocketFactory(SSLTLS) {
    SSL_CTX_set_min_proto_version(ctx_->get(), TLS1_2_VERSION);
    // A session ticket would make an idle connection look as if the daemon had hung up.
    SSL_CTX_set_num_tickets(ctx_->get(), 0);
  }
  bool KeyFitsCertificate() const { return SSL_CTX_check_private_key(ctx_->get()) == 1; }
};

template <typename Use>
Status UseFile(const std::string& path, const char* what, Use use) {
  if (!std::ifstream(path)) {
    return InvalidArgument(std::string(what) + " '" + path + "' cannot be read");
  }
  try {
    use(path.c_str());
    return OkStatus();
  } catch (const std::exception& error) {
    return InvalidArgument(std::string(what) + " '" + path + "': " + error.what());
  }
}

Status UseCertificate(Factory& factory, const std::string& cert_file, const std::string& key_file) {
  if (key_file.empty()) {
    return InvalidArgument("the TLS certificate '" + cert_file + "' needs its key file");
  }
  STOCKPOT_RETURN_IF_ERROR(UseFile(cert_file, "the TLS certificate",
                                   [&](const char* path) { factory.loadCertificate(path); }));
  STOCKPOT_RETURN_IF_ERROR(
      UseFile(key_file, "the TLS key", [&](const char* path) { factory.loadPrivateKey(path); }));
  if (factory.KeyFitsCertificate()) return OkStatus();
  return InvalidArgument("the TLS key '" + key_file + "' is not the one of '" + cert_file + "'");
}

Status Trust(Factory& factory, const std::string& ca_file) {
  return UseFile(ca_file, "the TLS authority",
                 [&](const char* path) { factory.loadTrustedCertificates(path); });
}

}  // namespace

Result<TlsFactory> MakeTlsFactory(const ServerTls& tls) {
  if (!tls.enabled()) {
    if (tls.key_file.empty() && tls.client_ca_file.empty()) return TlsFactory();
    return InvalidArgument("a TLS key or client authority without a certificate of the server");
  }
  SilenceThriftOutput();
  const auto factory = std::make_shared<Factory>();
  factory->server(true);
  STOCKPOT_RETURN_IF_ERROR(UseCertificate(*factory, tls.cert_file, tls.key_file));
  if (!tls.client_ca_file.empty()) STOCKPOT_RETURN_IF_ERROR(Trust(*factory, tls.client_ca_file));
  factory->authenticate(!tls.client_ca_file.empty());
  return TlsFactory(factory);
}

Result<TlsFactory> MakeTlsFactory(const ClientTls& tls) {
  if (!tls.enabled()) {
    if (tls.cert_file.empty() && tls.key_file.empty()) return TlsFactory();
    return InvalidArgument("a TLS certificate without the authority to trust");
  }
  SilenceThriftOutput();
  const auto factory = std::make_shared<Factory>();
  factory->server(false);
  STOCKPOT_RETURN_IF_ERROR(Trust(*factory, tls.ca_file));
  if (!tls.cert_file.empty() || !tls.key_file.empty()) {
    STOCKPOT_RETURN_IF_ERROR(UseCertificate(*factory, tls.cert_file, tls.key_file));
  }
  factory->authenticate(true);
  return TlsFactory(factory);
}

Result<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream in(path);
  std::string line(rpc_limits::kMaxTokenBytes + 2, '\0');
  if (!in) return InvalidArgument("the token file '" + path + "' cannot be read");
  in.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<size_t>(in.gcount()));
  line = line.substr(0, line.find('\n'));
  constexpr const char* kSpace = " \t\r";
  line.erase(0, line.find_first_not_of(kSpace));
  line.erase(line.find_last_not_of(kSpace) + 1);
  const auto bytes = static_cast<int64_t>(line.size());
  if (bytes < rpc_limits::kMinTokenBytes || bytes > rpc_limits::kMaxTokenBytes) {
    return InvalidArgument("the token in '" + path + "' has " + std::to_string(bytes) + " bytes; " +
                           std::to_string(rpc_limits::kMinTokenBytes) + " to " +
                           std::to_string(rpc_limits::kMaxTokenBytes) +
                           " are allowed (openssl rand -hex 32 makes one)");
  }
  return line;
}

bool SameToken(std::string_view a, std::string_view b) {
  // Of one length, whatever the tokens' are.
  const Digest left = Sha256(a);
  const Digest right = Sha256(b);
  return CRYPTO_memcmp(left.bytes.data(), right.bytes.data(), left.bytes.size()) == 0;
}

Status CheckTokenPath(const RpcAddress& address, bool has_token, bool has_tls) {
  if (!has_token || has_tls || IsLocal(address)) return OkStatus();
  return InvalidArgument("a token would travel readable to " + address.ToString() +
                         ": use TLS, a loopback address or a unix socket");
}

SigpipeBlock::SigpipeBlock() {
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  was_blocked_ = sigismember(&before, SIGPIPE) == 1;
}

SigpipeBlock::~SigpipeBlock() {
  if (was_blocked_) return;
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  const timespec now{};
  while (sigtimedwait(&pipe, nullptr, &now) == SIGPIPE) {
    // Ours, of this thread: it ends here.
  }
  pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
}

}  // namespace stockpot
