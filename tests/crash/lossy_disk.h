// What is on a disk that loses power: a model that follows a record of changes (watched_files.h)
// and, at any place of it, writes out one of the states in which the disk may be found.
//
// The rules are those of any file system with a journal of names, which RocksDB relies on too:
//   contents   a sync of a file makes everything written to it before permanent. Of later writes
//              each sector of 512 bytes holds any version it had since; those of a grown file that
//              did not arrive hold zeros or anything at all
//   names      a sync of a directory makes its entries permanent. Of later creations, renames and
//              removals in it the first few are there, in their order; a rename is one change.
//              Neither directories nor a name and its contents wait for each other
//
// Thread promise: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/crash/watched_files.h"

namespace stockpot::crash {

class LossyDisk {
 public:
  // Begins with what lies below `root`, all of it permanent.
  explicit LossyDisk(const std::filesystem::path& root);

  void Follow(const FileChange& change);

  // Writes one state after a loss of power into `target`, which is replaced.
  void LosePower(std::mt19937_64& random, const std::filesystem::path& target) const;

 private:
  struct Change {  // of contents, not permanent yet
    bool truncates = false;
    int64_t offset = 0;  // truncates: the new size
    const std::vector<std::byte>* bytes = nullptr;
  };
  struct File {
    std::vector<std::byte> permanent;
    std::vector<Change> pending;
  };
  struct Directory;
  struct Node {  // one of the two
    std::shared_ptr<File> file;
    std::shared_ptr<Directory> directory;
  };
  struct NameChange {  // removes `from` where it is given, then enters `to` where it is given
    std::string from;
    std::string to;
    Node node;
  };
  using Names = std::map<std::string, Node>;
  struct Directory {
    Names permanent;
    Names now;
    std::vector<NameChange> pending;
  };

  static void Load(const std::filesystem::path& path, Directory& directory);
  static void ApplyName(const NameChange& change, Names& names);
  void ChangeName(const std::string& path, NameChange change);
  // The directory that holds `path`, and the name in it.
  Directory& DirectoryOf(const std::string& path, std::string& name) const;
  Node* Find(const std::string& path) const;

  static std::vector<std::byte> ContentsAfterLoss(const File& file, std::mt19937_64& random);
  static void WriteDirectory(const Directory& directory, std::mt19937_64& random,
                             const std::filesystem::path& target);

  std::shared_ptr<Directory> root_ = std::make_shared<Directory>();
  std::map<int64_t, std::shared_ptr<File>> handles_;
};

}  // namespace stockpot::crash
