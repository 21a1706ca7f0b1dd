// Certificates for tests: an authority, and what it signed for a name.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace stockpot {

// Writes PEM files into a folder. EC keys, so that making one takes no time.
class TestAuthority {
 public:
  TestAuthority(std::filesystem::path folder, const std::string& name);
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;

  std::string ca_file() const { return File("ca.pem"); }
  // NAME.pem and NAME.key, valid for `host` (a DNS name or an IPv4 address).
  struct Signed {
    std::string cert_file;
    std::string key_file;
  };
  Signed Sign(const std::string& name, const std::string& host) const;

 private:
  struct Keys;
  std::string File(const std::string& name) const {
    return (folder_ / (name_ + "." + name)).string();
  }

  const std::filesystem::path folder_;
  const std::string name_;
  std::unique_ptr<Keys> keys_;
};

}  // namespace stockpot
