#include "tests/unit/kernels/cuda_emulation/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace stockpot::emulation {
namespace {

namespace context = boost::context::detail;

constexpr size_t kStackBytes = 256 << 10;  // AddressSanitizer's frames are fat
constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kUnwritten = 0xA5;
constexpr unsigned char kUnderway = 0xFF;
constexpr size_t kCopyBytes = 16;  // the largest asynchronous copy

// ThreadSanitizer keeps one call stack for all fibers of this thread: a function that is entered
// and never left must not push a frame, or its books fill up. (To make fibers of its own takes
// several times as long as what runs in them.)
#define STOCKPOT_NEVER_LEFT __attribute__((no_sanitize("thread")))

// A fiber's stack, with a guard page below it.
class Stack {
 public:
  Stack() {
    memory_ = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_, kGuardBytes, PROT_NONE);
  }
  ~Stack() { munmap(memory_, kGuardBytes + kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* bottom() const { return static_cast<char*>(memory_) + kGuardBytes; }
  char* top() const { return bottom() + kStackBytes; }

 private:
  void* memory_;
};

struct Copy {
  void* to = nullptr;
  size_t bytes = 0;
  unsigned char value[kCopyBytes] = {};
};

struct Fiber {
  context::fcontext_t context = nullptr;
  void* sanitizer_stack = nullptr;
  bool ended = false;
  Dim3 thread;
  int index = 0;               // linear, in the block
  const char* waits_for = "";  // for the message of a deadlock
  std::vector<Copy> begun;     // not in a group yet
  std::deque<std::vector<Copy>> groups;
};

// A meeting of lanes that name one mask. Slots are double: a fast lane may enter the next meeting
// while a slow one still reads this.
struct Meeting {
  uint32_t mask = 0;
  uint32_t arrived = 0;
  uint64_t generation = 0;
  uint32_t lanes[2] = {};
  unsigned char slots[2][kWarpLanes][kExchangeBytes] = {};
};

struct Warp {
  uint32_t live = 0;
  std::vector<std::unique_ptr<Meeting>> meetings;
};

struct Shared {
  std::unique_ptr<unsigned char[]> memory;
  size_t bytes = 0;
};

// Everything of the grid that is running on this host thread.
class Machine {
 public:
  Machine(Dim3 grid_size, Dim3 block_size, const Schedule& schedule,
          const std::function<void()>& body, size_t dynamic_bytes)
      : grid(grid_size),
        block(block_size),
        schedule_(schedule),
        body_(body),
        dynamic_bytes_(dynamic_bytes),
        dynamic_(new unsigned char[dynamic_bytes]),
        random_(schedule.seed) {
    threads_ = static_cast<int>(block.x * block.y * block.z);
    for (int i = 0; i < threads_; ++i) stacks_.push_back(std::make_unique<Stack>());
    turns_.resize(static_cast<size_t>(threads_));
    std::iota(turns_.begin(), turns_.end(), 0);
    if (schedule.order == ThreadOrder::kReverse) std::reverse(turns_.begin(), turns_.end());
  }

  void RunBlock(Dim3 index) {
    block_index = index;
    Prepare();
    while (live_ > 0) {
      const uint64_t before = progress_;
      if (schedule_.order == ThreadOrder::kShuffled) {
        std::shuffle(turns_.begin(), turns_.end(), random_);
      }
      // Twice: a thread that ends may free those that had their turn before it.
      for (int round = 0; round < 2; ++round) {
        for (const int i : turns_) {
          if (!fibers_[static_cast<size_t>(i)].ended) Resume(&fibers_[static_cast<size_t>(i)]);
          if (error_) std::rethrow_exception(error_);
        }
      }
      if (progress_ == before) throw std::runtime_error(DescribeDeadlock());
    }
  }

  void Barrier() {
    const uint64_t mine = barrier_generation_;
    ++barrier_arrived_;
    ++progress_;
    current->waits_for = "__syncthreads";
    while (barrier_generation_ == mine) {
      if (barrier_arrived_ >= live_) {
        barrier_arrived_ = 0;
        ++barrier_generation_;
        ++progress_;
        return;
      }
      Yield();
    }
  }

  Exchanged Meet(uint32_t mask, const void* value, size_t bytes) {
    const int lane = current->index % kWarpLanes;
    if (!((mask >> lane) & 1)) throw std::logic_error("a lane is not in the mask of its own call");
    Warp& warp = warps_[static_cast<size_t>(current->index / kWarpLanes)];
    Meeting& meeting = MeetingOf(warp, mask);
    const uint64_t mine = meeting.generation;
    const size_t side = mine % 2;
    std::memcpy(meeting.slots[side][lane], value, bytes);
    meeting.arrived |= 1u << lane;
    ++progress_;
    current->waits_for = "a warp collective";
    while (meeting.generation == mine) {
      if ((meeting.mask & warp.live & ~meeting.arrived) == 0) {
        meeting.lanes[side] = meeting.arrived;
        meeting.arrived = 0;
        ++meeting.generation;
        ++progress_;
        break;
      }
      Yield();
    }
    return {meeting.slots[side], meeting.lanes[side]};
  }

  void* SharedAt(const void* place, size_t bytes) {
    Shared& shared = shared_[place];
    if (shared.memory == nullptr) {
      shared.memory.reset(new unsigned char[bytes]);  // heap: a sanitizer sees its ends
      shared.bytes = bytes;
      std::memset(shared.memory.get(), kUnwritten, bytes);
    }
    return shared.memory.get();
  }

  void* Dynamic() const { return dynamic_.get(); }

  void BeginCopy(void* to, const void* from, size_t bytes, size_t source_bytes) const {
    const auto misaligned = [bytes](const void* p) {
      return reinterpret_cast<uintptr_t>(p) % bytes != 0;
    };
    if (misaligned(to) || misaligned(from)) throw std::logic_error("a misaligned async copy");
    if (source_bytes > bytes) throw std::logic_error("an async copy of more than its target holds");
    Copy copy{to, bytes, {}};
    std::memcpy(copy.value, from, source_bytes);
    std::memset(to, kUnderway, bytes);
    current->begun.push_back(copy);
  }

  void CommitCopies() const {
    current->groups.push_back(std::move(current->begun));
    current->begun.clear();
  }

  void WaitForCopies(size_t pending) const {
    auto& groups = current->groups;
    for (; groups.size() > pending; groups.pop_front()) {
      for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.value, copy.bytes);
    }
  }

  const Dim3 grid;
  const Dim3 block;
  Dim3 block_index;
  Fiber* current = nullptr;

 private:
  void Prepare() {
    fibers_.assign(static_cast<size_t>(threads_), Fiber());
    warps_.clear();
    warps_.resize(static_cast<size_t>((threads_ + kWarpLanes - 1) / kWarpLanes));
    for (auto& [place, shared] : shared_)
      std::memset(shared.memory.get(), kUnwritten, shared.bytes);
    std::memset(dynamic_.get(), kUnwritten, dynamic_bytes_);
    barrier_arrived_ = 0;
    live_ = threads_;
    for (int i = 0; i < threads_; ++i) {
      Fiber& fiber = fibers_[static_cast<size_t>(i)];
      const unsigned u = static_cast<unsigned>(i);
      fiber.index = i;
      fiber.thread = {u % block.x, u / block.x % block.y, u / (block.x * block.y)};
#if defined(__SANITIZE_ADDRESS__)
      // Frames that a fiber never left, as its last one, have left their red zones behind.
      __asan_unpoison_memory_region(stacks_[static_cast<size_t>(i)]->bottom(), kStackBytes);
#endif
      fiber.context =
          context::make_fcontext(stacks_[static_cast<size_t>(i)]->top(), kStackBytes, &Entry);
      warps_[static_cast<size_t>(i / kWarpLanes)].live |= 1u << (i % kWarpLanes);
    }
  }

  static Meeting& MeetingOf(Warp& warp, uint32_t mask) {
    for (auto& meeting : warp.meetings) {
      if (meeting->mask == mask) return *meeting;
    }
    warp.meetings.push_back(std::make_unique<Meeting>());
    warp.meetings.back()->mask = mask;
    return *warp.meetings.back();
  }

  // Runs a fiber until it yields or ends.
  void Resume(Fiber* fiber) {
    current = fiber;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(
        &sanitizer_scheduler_, stacks_[static_cast<size_t>(fiber->index)]->bottom(), kStackBytes);
#endif
    const context::transfer_t transfer = context::jump_fcontext(fiber->context, this);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(sanitizer_scheduler_, nullptr, nullptr);
#endif
    fiber->context = transfer.fctx;
    current = nullptr;
  }

  // Gives the turn back to the scheduler.
  STOCKPOT_NEVER_LEFT void Yield() {
    Fiber* me = current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(me->ended ? nullptr : &me->sanitizer_stack, scheduler_bottom_,
                                   scheduler_bytes_);
#endif
    const context::transfer_t transfer = context::jump_fcontext(scheduler_, nullptr);
    AfterSwitch(me->sanitizer_stack, transfer);
  }

  void AfterSwitch([[maybe_unused]] void* sanitizer_stack, const context::transfer_t& transfer) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(sanitizer_stack, &scheduler_bottom_, &scheduler_bytes_);
#endif
    scheduler_ = transfer.fctx;
  }

  STOCKPOT_NEVER_LEFT static void Entry(context::transfer_t transfer) {
    auto* machine = static_cast<Machine*>(transfer.data);
    machine->AfterSwitch(nullptr, transfer);
    try {
      machine->body_();
      RefuseForgottenCopies(*machine->current);
    } catch (...) {
      machine->error_ = std::current_exception();
    }
    Fiber* me = machine->current;
    me->ended = true;
    --machine->live_;
    ++machine->progress_;
    machine->warps_[static_cast<size_t>(me->index / kWarpLanes)].live &=
        ~(1u << (me->index % kWarpLanes));
    machine->Yield();  // never comes back
  }

  static void RefuseForgottenCopies(const Fiber& fiber) {
    size_t copies = fiber.begun.size();
    for (const auto& group : fiber.groups) copies += group.size();
    if (copies == 0) return;
    throw std::logic_error("thread " + std::to_string(fiber.index) + " ends with " +
                           std::to_string(copies) + " async copies it has not waited for");
  }

  std::string DescribeDeadlock() const {
    std::string message = "deadlock:";
    int named = 0;
    for (const Fiber& fiber : fibers_) {
      if (fiber.ended) continue;
      if (++named > 8) return message + " ...";
      message += " thread " + std::to_string(fiber.index) + " at " + fiber.waits_for + ";";
    }
    return message;
  }

  const Schedule schedule_;
  const std::function<void()>& body_;
  const size_t dynamic_bytes_;
  const std::unique_ptr<unsigned char[]> dynamic_;
  std::mt19937_64 random_;
  int threads_ = 0;
  std::vector<std::unique_ptr<Stack>> stacks_;
  std::vector<int> turns_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::map<const void*, Shared> shared_;
  int live_ = 0;
  int barrier_arrived_ = 0;
  uint64_t barrier_generation_ = 0;
  uint64_t progress_ = 0;
  std::exception_ptr error_;
  context::fcontext_t scheduler_ = nullptr;
  [[maybe_unused]] void* sanitizer_scheduler_ = nullptr;
  [[maybe_unused]] const void* scheduler_bottom_ = nullptr;
  [[maybe_unused]] size_t scheduler_bytes_ = 0;
};

// Device code names threadIdx and the like without an argument: the one place that needs a pointer
// beside the call.
thread_local Machine* running = nullptr;

}  // namespace

void RunGrid(Dim3 grid, Dim3 block, const Schedule& schedule, const std::function<void()>& body,
             size_t dynamic_bytes) {
  Machine machine(grid, block, schedule, body, dynamic_bytes);
  running = &machine;
  struct Reset {
    ~Reset() { running = nullptr; }
  } reset;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) machine.RunBlock({x, y, z});
    }
  }
}

Dim3 ThreadIndex() { return running->current->thread; }
Dim3 BlockIndex() { return running->block_index; }
Dim3 BlockSize() { return running->block; }
Dim3 GridSize() { return running->grid; }
int Lane() { return running->current->index % kWarpLanes; }
void BlockBarrier() { running->Barrier(); }

Exchanged Exchange(uint32_t mask, const void* value, size_t bytes) {
  return running->Meet(mask, value, bytes);
}

void* SharedMemory(const void* place, size_t bytes) { return running->SharedAt(place, bytes); }
void* DynamicSharedMemory() { return running->Dynamic(); }

void BeginCopy(void* to, const void* from, size_t bytes, size_t source_bytes) {
  running->BeginCopy(to, from, bytes, source_bytes);
}
void CommitCopies() { running->CommitCopies(); }
void WaitForCopies(int pending) { running->WaitForCopies(static_cast<size_t>(pending)); }

}  // namespace stockpot::emulation
