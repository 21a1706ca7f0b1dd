// Preloaded under ThreadSanitizer, which sees no futex of the uninstrumented libgomp: a parallel
// region's threads start after what its caller did before, and its caller goes on after what they
// did. What they do beside each other stays unordered, also where one ended before another began.
#include <dlfcn.h>

extern "C" {
// Absent in a process without ThreadSanitizer.
void __tsan_acquire(void* address) __attribute__((weak));
void __tsan_release(void* address) __attribute__((weak));
}

namespace {

// The address of a member names an event.
struct Region {
  void (*body)(void*);  // the region starts
  void* data;           // a thread of it ends
};

void HappensBefore(void* event) {
  if (__tsan_release != nullptr) __tsan_release(event);
}

void HappensAfter(void* event) {
  if (__tsan_acquire != nullptr) __tsan_acquire(event);
}

void RunBody(void* argument) {
  auto* region = static_cast<Region*>(argument);
  HappensAfter(&region->body);
  region->body(region->data);
  HappensBefore(&region->data);
}

}  // namespace

// What compilers call for `#pragma omp parallel`.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto real = reinterpret_cast<Parallel>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{body, data};
  HappensBefore(&region.body);
  real(RunBody, &region, threads, flags);
  HappensAfter(&region.data);
}
