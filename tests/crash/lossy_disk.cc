#include "tests/crash/lossy_disk.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <string_view>

#include "kernels/base/check.h"

namespace stockpot::crash {
namespace {

constexpr size_t kSectorBytes = 512;

void Overwrite(std::vector<std::byte>& contents, int64_t offset, std::span<const std::byte> bytes) {
  const size_t end = static_cast<size_t>(offset) + bytes.size();
  if (contents.size() < end) contents.resize(end);
  std::memcpy(contents.data() + offset, bytes.data(), bytes.size());
}

// How much of what was pending is there after the loss.
enum class Kept { kNothing, kPrefix, kSome, kEverything };
Kept RandomKept(std::mt19937_64& random) {
  constexpr std::array kOften = {Kept::kNothing, Kept::kPrefix, Kept::kPrefix, Kept::kSome,
                                 Kept::kSome,    Kept::kEverything};
  return kOften[random() % kOften.size()];
}

}  // namespace

LossyDisk::LossyDisk(const std::filesystem::path& root) { Load(root, *root_); }

void LossyDisk::Load(const std::filesystem::path& path, Directory& directory) {
  if (!std::filesystem::exists(path)) return;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    Node node;
    if (entry.is_directory()) {
      node.directory = std::make_shared<Directory>();
      Load(entry.path(), *node.directory);
    } else {
      node.file = std::make_shared<File>();
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string contents{std::istreambuf_iterator<char>(in), {}};
      node.file->permanent.resize(contents.size());
      std::memcpy(node.file->permanent.data(), contents.data(), contents.size());
    }
    directory.permanent[entry.path().filename().string()] = node;
  }
  directory.now = directory.permanent;
}

LossyDisk::Directory& LossyDisk::DirectoryOf(const std::string& path, std::string& name) const {
  Directory* directory = root_.get();
  std::string_view rest = path;
  for (size_t slash; (slash = rest.find('/')) != std::string_view::npos;) {
    const auto it = directory->now.find(std::string(rest.substr(0, slash)));
    STOCKPOT_CHECK(it != directory->now.end() && it->second.directory != nullptr, path);
    directory = it->second.directory.get();
    rest.remove_prefix(slash + 1);
  }
  name = rest;
  return *directory;
}

LossyDisk::Node* LossyDisk::Find(const std::string& path) const {
  std::string name;
  Directory& directory = DirectoryOf(path, name);
  const auto it = directory.now.find(name);
  return it == directory.now.end() ? nullptr : &it->second;
}

void LossyDisk::ApplyName(const NameChange& change, Names& names) {
  if (!change.from.empty()) names.erase(change.from);
  if (!change.to.empty()) names[change.to] = change.node;
}

void LossyDisk::ChangeName(const std::string& path, NameChange change) {
  std::string name;
  Directory& directory = DirectoryOf(path, name);
  ApplyName(change, directory.now);
  directory.pending.push_back(std::move(change));
}

void LossyDisk::Follow(const FileChange& change) {
  std::string name;
  switch (change.kind) {
    case FileChange::Kind::kOpen: {
      if (change.created) {
        DirectoryOf(change.path, name);
        ChangeName(change.path, {.to = name, .node = {.file = std::make_shared<File>()}});
      }
      const Node* node = Find(change.path);
      STOCKPOT_CHECK(node != nullptr && node->file != nullptr, change.path);
      if (change.truncated && !change.created) node->file->pending.push_back({.truncates = true});
      handles_[change.handle] = node->file;
      return;
    }
    case FileChange::Kind::kWrite:
      handles_.at(change.handle)
          ->pending.push_back({.offset = change.offset, .bytes = &change.bytes});
      return;
    case FileChange::Kind::kTruncate: {
      const auto& file =
          change.handle != 0 ? handles_.at(change.handle) : Find(change.path)->file;
      file->pending.push_back({.truncates = true, .offset = change.offset});
      return;
    }
    case FileChange::Kind::kSync: {
      File& file = *handles_.at(change.handle);
      for (const Change& pending : file.pending) {
        if (pending.truncates) {
          file.permanent.resize(static_cast<size_t>(pending.offset));
        } else {
          Overwrite(file.permanent, pending.offset, *pending.bytes);
        }
      }
      file.pending.clear();
      return;
    }
    case FileChange::Kind::kSyncDirectory: {
      Directory* directory = root_.get();
      if (!change.path.empty()) directory = Find(change.path)->directory.get();
      directory->permanent = directory->now;
      directory->pending.clear();
      return;
    }
    case FileChange::Kind::kRename: {
      std::string to;
      const Directory& left = DirectoryOf(change.path, name);
      const Directory& entered = DirectoryOf(change.to, to);
      STOCKPOT_CHECK(&left == &entered, change.path, change.to);
      ChangeName(change.path, {.from = name, .to = to, .node = *Find(change.path)});
      return;
    }
    case FileChange::Kind::kUnlink:
      DirectoryOf(change.path, name);
      ChangeName(change.path, {.from = name});
      return;
    case FileChange::Kind::kMakeDirectory:
      DirectoryOf(change.path, name);
      ChangeName(change.path, {.to = name, .node = {.directory = std::make_shared<Directory>()}});
      return;
    case FileChange::Kind::kNote:
      return;
  }
}

std::vector<std::byte> LossyDisk::ContentsAfterLoss(const File& file, std::mt19937_64& random) {
  std::vector<std::byte> contents = file.permanent;
  const Kept kept = RandomKept(random);
  if (kept == Kept::kNothing || file.pending.empty()) return contents;
  size_t changes = file.pending.size();
  if (kept == Kept::kPrefix) changes = 1 + random() % changes;
  const bool garbage = random() % 4 == 0;  // in sectors of the grown file that did not arrive
  std::map<int64_t, size_t> versions;      // kSome: how many of the changes reached the sector
  const auto arrived = [&](int64_t sector, size_t change) {
    if (kept != Kept::kSome) return true;
    const auto [it, first] = versions.try_emplace(sector, 0);
    if (first) it->second = random() % 2 == 0 ? changes * (random() % 2) : random() % (changes + 1);
    return change < it->second;
  };
  for (size_t i = 0; i < changes; ++i) {
    const Change& change = file.pending[i];
    if (change.truncates) {
      contents.resize(static_cast<size_t>(change.offset));
      continue;
    }
    std::span<const std::byte> bytes = *change.bytes;
    const bool torn = kept == Kept::kPrefix && i + 1 == changes;
    size_t sectors_left = torn ? random() % (bytes.size() / kSectorBytes + 2) : SIZE_MAX;
    for (int64_t offset = change.offset; !bytes.empty() && sectors_left > 0; --sectors_left) {
      const auto within = static_cast<size_t>(offset) % kSectorBytes;
      const auto piece = bytes.first(std::min(bytes.size(), kSectorBytes - within));
      if (arrived(offset / static_cast<int64_t>(kSectorBytes), i)) {
        const size_t before = contents.size();
        Overwrite(contents, offset, piece);
        for (size_t gap = before; garbage && gap < static_cast<size_t>(offset); ++gap) {
          contents[gap] = static_cast<std::byte>(random());
        }
      }
      bytes = bytes.subspan(piece.size());
      offset += static_cast<int64_t>(piece.size());
    }
  }
  return contents;
}

void LossyDisk::WriteDirectory(const Directory& directory, std::mt19937_64& random,
                               const std::filesystem::path& target) {
  std::filesystem::create_directories(target);
  Names names = directory.permanent;
  const Kept kept = RandomKept(random);
  size_t changes = kept == Kept::kNothing ? 0 : directory.pending.size();
  if (kept == Kept::kPrefix || kept == Kept::kSome) changes = random() % (changes + 1);
  for (size_t i = 0; i < changes; ++i) ApplyName(directory.pending[i], names);
  for (const auto& [name, node] : names) {
    if (node.directory != nullptr) {
      WriteDirectory(*node.directory, random, target / name);
      continue;
    }
    const std::vector<std::byte> contents = ContentsAfterLoss(*node.file, random);
    std::ofstream out(target / name, std::ios::binary);
    out.write(reinterpret_cast<const char*>(contents.data()),
              static_cast<std::streamsize>(contents.size()));
    STOCKPOT_CHECK(out.good(), name);
  }
}

void LossyDisk::LosePower(std::mt19937_64& random, const std::filesystem::path& target) const {
  std::filesystem::remove_all(target);
  WriteDirectory(*root_, random, target);
}

}  // namespace stockpot::crash
