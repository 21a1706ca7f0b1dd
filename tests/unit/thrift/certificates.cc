#include "tests/unit/thrift/certificates.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cctype>
#include <cstdio>

namespace stockpot {
namespace {

constexpr int64_t kDaySeconds = 24 * 60 * 60;

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

Key NewKey() { return {EVP_EC_gen("P-256"), EVP_PKEY_free}; }

void AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  ASSERT_NE(extension, nullptr) << value;
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// `issuer` null: signed by itself, an authority.
Certificate NewCertificate(const std::string& name, EVP_PKEY* key, X509* issuer,
                           EVP_PKEY* issuer_key, const std::string& subject_alternative) {
  Certificate certificate(X509_new(), X509_free);
  static long serial = 1;
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -kDaySeconds);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), kDaySeconds);
  X509_set_pubkey(certificate.get(), key);
  X509_NAME* subject = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(certificate.get(),
                       issuer == nullptr ? subject : X509_get_subject_name(issuer));
  X509* const by = issuer == nullptr ? certificate.get() : issuer;
  AddExtension(certificate.get(), by, NID_basic_constraints,
               issuer == nullptr ? "critical,CA:TRUE" : "CA:FALSE");
  if (!subject_alternative.empty()) {
    AddExtension(certificate.get(), by, NID_subject_alt_name, subject_alternative);
  }
  EXPECT_GT(X509_sign(certificate.get(), issuer_key, EVP_sha256()), 0);
  return certificate;
}

void WriteCertificate(const std::string& path, X509* certificate) {
  FILE* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr) << path;
  EXPECT_EQ(PEM_write_X509(file, certificate), 1);
  std::fclose(file);
}

void WriteKey(const std::string& path, EVP_PKEY* key) {
  FILE* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr) << path;
  EXPECT_EQ(PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr), 1);
  std::fclose(file);
}

}  // namespace

struct TestAuthority::Keys {
  Key key = NewKey();
  Certificate certificate{nullptr, X509_free};
};

TestAuthority::TestAuthority(std::filesystem::path folder, const std::string& name)
    : folder_(std::move(folder)), name_(name), keys_(std::make_unique<Keys>()) {
  keys_->certificate = NewCertificate(name, keys_->key.get(), nullptr, keys_->key.get(), "");
  WriteCertificate(ca_file(), keys_->certificate.get());
}

TestAuthority::~TestAuthority() = default;

TestAuthority::Signed TestAuthority::Sign(const std::string& name, const std::string& host) const {
  const bool is_address = std::isdigit(static_cast<unsigned char>(host.back())) != 0;
  const Key key = NewKey();
  const Certificate certificate =
      NewCertificate(name, key.get(), keys_->certificate.get(), keys_->key.get(),
                     (is_address ? "IP:" : "DNS:") + host);
  const Signed made{File(name + ".pem"), File(name + ".key")};
  WriteCertificate(made.cert_file, certificate.get());
  WriteKey(made.key_file, key.get());
  return made;
}

}  // namespace stockpot
