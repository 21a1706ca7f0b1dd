// A plain blocking HTTP/1.1 client for tests: it can also misbehave (half requests, no reading).
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace stockpot::test {

using Json = nlohmann::ordered_json;

struct HttpReply {
  int status = 0;                              // 0: the connection ended before a whole reply
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined

  Json json() const;  // discarded if it is not JSON
};

class HttpClient {
 public:
  explicit HttpClient(uint16_t port);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  HttpReply Get(const std::string& path);
  HttpReply Post(const std::string& path, const std::string& body);
  HttpReply Post(const std::string& path, const Json& body) { return Post(path, body.dump()); }

  // The parts, for tests that break the rules.
  bool Send(std::string_view bytes);  // false: the peer is gone
  HttpReply Receive();
  // What arrives until a whole reply's header is there, "" if the connection ends.
  bool WaitForData();  // false: the connection ended
  bool AtEnd();        // waits for the peer's close; false: data came instead
  void Close();
  void SetReceiveBufferBytes(int bytes);

 private:
  bool Fill();
  bool ReadUntil(size_t bytes);

  int socket_ = -1;
  std::string buffer_;
};

std::string PostText(const std::string& path, const std::string& body);

// The data of each event of a server-sent stream, "[DONE]" included. Fails the test on anything
// else.
std::vector<std::string> SseData(const std::string& body);

}  // namespace stockpot::test
