// Who may connect, and who can read along: TLS 1.2 or later on TCP, and a token.
//
// The token is checked once a connection, in `hello`, and not in every call: the two ends of a TCP
// or TLS connection do not change, so a later check would prove nothing that the first did not,
// while a secret in every call ends up in every log of calls. Without TLS anybody on the way can
// read it: neither side takes a token for an address that is not of this machine (IsLocal) then.
//
// Thread promise: pure functions; a factory may be used from any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "kernels/base/status.h"
#include "thrift/address.h"

namespace apache::thrift::transport {
class TSSLSocketFactory;
}

namespace stockpot {

// Paths of PEM files. TLS is spoken on TCP addresses only: a unix socket has its file's mode.
struct ServerTls {
  std::string cert_file;       // the chain, the server's own first; empty: no TLS
  std::string key_file;        // REQUIRED with it
  std::string client_ca_file;  // not empty: clients must show a certificate of one of these

  bool enabled() const { return !cert_file.empty(); }
};

struct ClientTls {
  std::string
      ca_file;  // whom to trust; empty: no TLS. The certificate must name the address's host
  std::string cert_file;  // to show, where the server asks for one; empty: none
  std::string key_file;   // REQUIRED with it

  bool enabled() const { return !ca_file.empty(); }
};

using TlsFactory = std::shared_ptr<apache::thrift::transport::TSSLSocketFactory>;

// Null where TLS is not enabled. InvalidArgument names the file that cannot be used, or is missing.
Result<TlsFactory> MakeTlsFactory(const ServerTls& tls);
Result<TlsFactory> MakeTlsFactory(const ClientTls& tls);

// The first line of a file, without the space around it. InvalidArgument: shorter than 16 bytes,
// longer than 4096.
Result<std::string> ReadTokenFile(const std::string& path);

// Takes the same time wherever the first difference is.
bool SameToken(std::string_view a, std::string_view b);

// InvalidArgument if `token` would travel readable to another machine.
Status CheckTokenPath(const RpcAddress& address, bool has_token, bool has_tls);

// A write to a TLS connection that the other end closed raises SIGPIPE, which would end a trainer.
// While this lives it does not reach this thread. Nested uses are fine.
class SigpipeBlock {
 public:
  SigpipeBlock();
  ~SigpipeBlock();
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  bool was_blocked_ = false;
};

}  // namespace stockpot
