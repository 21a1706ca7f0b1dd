// The host twins of kernels/base/cuda_mma.cuh against plain loops, and that they catch misuse.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"
#include "tests/unit/kernels/cuda_emulation/cuda_emulation.h"

namespace stockpot {
namespace {

using emulation::Schedule;
using emulation::ThreadOrder;

// Row-major A [16, 16], B [16, 8] and D [16, 8], gathered into fragments as the PTX ISA lists them:
// the k-th element pair of a register by group g = lane / 4 and thread t = lane % 4 of the group.
void MmaKernel(const uint16_t* a, const uint16_t* b, float* d) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
  uint32_t fragment[4];
  for (int i = 0; i < 8; ++i) {  // a0 .. a7 of the ISA
    const int row = i < 2 || (i >= 4 && i < 6) ? g : g + 8;
    const int col = t * 2 + (i & 1) + (i < 4 ? 0 : 8);
    const uint32_t value = a[row * 16 + col];
    fragment[i / 2] = i % 2 == 0 ? value : fragment[i / 2] | value << 16;
  }
  uint32_t other[2];
  for (int i = 0; i < 4; ++i) {  // b0 .. b3
    const uint32_t value = b[(t * 2 + (i & 1) + (i < 2 ? 0 : 8)) * 8 + g];
    other[i / 2] = i % 2 == 0 ? value : other[i / 2] | value << 16;
  }
  float sum[4];
  const auto place = [&](int i) { return (i < 2 ? g : g + 8) * 8 + t * 2 + (i & 1); };
  for (int i = 0; i < 4; ++i) sum[i] = d[place(i)];
  MmaBF16(sum, fragment, other[0], other[1]);
  for (int i = 0; i < 4; ++i) d[place(i)] = sum[i];
}

struct MmaProblem {
  std::vector<uint16_t> a = std::vector<uint16_t>(256), b = std::vector<uint16_t>(128);
  std::vector<float> d = std::vector<float>(128);
};

template <typename Draw>
MmaProblem DrawMma(Draw draw) {
  MmaProblem p;
  for (uint16_t& value : p.a) value = BF16FromFloat(draw());
  for (uint16_t& value : p.b) value = BF16FromFloat(draw());
  for (float& value : p.d) value = draw();
  return p;
}

// d + a b in double; *largest gets the largest operand of the sum.
double PlainMma(const MmaProblem& p, int row, int col, double* largest) {
  double sum = p.d[row * 8 + col];
  *largest = std::fabs(sum);
  for (int k = 0; k < 16; ++k) {
    const double product =
        static_cast<double>(FloatFromBF16(p.a[row * 16 + k])) * FloatFromBF16(p.b[k * 8 + col]);
    sum += product;
    *largest = std::fmax(*largest, std::fabs(product));
  }
  return sum;
}

TEST(MmaEmulation, IsExactWhereFloat32Is) {
  std::mt19937 random(1);
  const MmaProblem p =
      DrawMma([&] { return static_cast<float>(static_cast<int>(random() % 255) - 127); });
  for (const ThreadOrder order :
       {ThreadOrder::kForward, ThreadOrder::kReverse, ThreadOrder::kShuffled}) {
    std::vector<float> d = p.d;
    EmulateLaunch({order, 3}, {1}, {32}, MmaKernel, p.a.data(), p.b.data(), d.data());
    for (int i = 0; i < 128; ++i) {
      double largest;
      ASSERT_EQ(d[i], PlainMma(p, i / 8, i % 8, &largest)) << i;
    }
  }
}

TEST(MmaEmulation, CutsLikeATensorCore) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 50; ++round) {
    const MmaProblem p = DrawMma([&] { return std::ldexp(normal(random), round % 7); });
    std::vector<float> d = p.d;
    EmulateLaunch({}, {1}, {32}, MmaKernel, p.a.data(), p.b.data(), d.data());
    for (int i = 0; i < 128; ++i) {
      double largest;
      const double want = PlainMma(p, i / 8, i % 8, &largest);
      // An addition of nine operands: each is cut by less than 2^-23 of the largest, the sum (at
      // most nine times that) by 2^-23 of itself. The second starts from the sum of the first.
      const double bound = std::ldexp((18 + 9 * 18) * largest, -23);
      ASSERT_NEAR(d[i], want, bound) << round << ' ' << i;
    }
  }
}

TEST(MmaEmulation, CutsTowardsZero) {
  // 1 + 2^-24 and -1 - 2^-24 keep their sizes; IEEE would not tell, 2^-23 * 1.5 it would round up.
  double products[8] = {};
  products[3] = std::ldexp(1.5, -23);
  EXPECT_EQ(emulation::TensorCoreSum(1.0f, products), 1.0f + std::ldexp(1.0f, -23));
  products[3] = -products[3];
  EXPECT_EQ(emulation::TensorCoreSum(-1.0f, products), -1.0f - std::ldexp(1.0f, -23));
  products[3] = std::nan("");
  EXPECT_TRUE(std::isnan(emulation::TensorCoreSum(1.0f, products)));
}

void PartialMmaKernel(float* d) {
  if (threadIdx.x == 5) return;
  const uint32_t a[4] = {};
  float sum[4] = {};
  MmaBF16(sum, a, 0, 0);
  d[0] = sum[0];
}

TEST(MmaEmulation, NeedsTheWholeWarp) {
  float d;
  EXPECT_THROW(EmulateLaunch({}, {1}, {32}, PartialMmaKernel, &d), std::logic_error);
}

using Lop3Function = uint32_t (*)(uint32_t, uint32_t, uint32_t);

template <size_t... kTables>
std::vector<Lop3Function> AllTables(std::index_sequence<kTables...>) {
  return {&Lop3<static_cast<uint8_t>(kTables)>...};
}

TEST(Lop3Emulation, IsEveryTable) {
  const std::vector<Lop3Function> tables = AllTables(std::make_index_sequence<256>());
  for (unsigned table = 0; table < 256; ++table) {
    for (unsigned bits = 0; bits < 8; ++bits) {
      const uint32_t a = bits & 4 ? ~0u : 0u, b = bits & 2 ? ~0u : 0u, c = bits & 1 ? ~0u : 0u;
      EXPECT_EQ(tables[table](a, b, c), (table >> bits) & 1 ? ~0u : 0u) << table << ' ' << bits;
    }
  }
  constexpr uint8_t kAndOr = (0xF0 & 0xCC) | 0xAA;
  std::mt19937 random(3);
  for (int i = 0; i < 100; ++i) {
    const uint32_t a = random(), b = random(), c = random();
    EXPECT_EQ(Lop3<kAndOr>(a, b, c), (a & b) | c);
  }
}

TEST(PackEmulation, HalvesAndRounding) {
  EXPECT_EQ(PackHighHalves(0x12345678u, 0x9abcdef0u), 0x9abc1234u);
  EXPECT_EQ(PackBF16(1.0f, -2.0f), 0xC0003F80u);
  EXPECT_EQ(PackBF16(1.00390625f, 1.01171875f), 0x3F823F80u);  // halfway, to even
}

// Copies eight words a thread in two groups, and reads after `kPending` of them may be under way.
template <int kPending>
void CopyKernel(const uint32_t* in, uint32_t* out) {
  STOCKPOT_SHARED(uint32_t, words, [32 * 8]);
  uint32_t* own = words + threadIdx.x * 8;
  CopyAsync16(own, in + threadIdx.x * 8, 16);
  CommitCopies();
  CopyAsync16(own + 4, in + threadIdx.x * 8 + 4, 8);
  CommitCopies();
  WaitForCopies<kPending>();
  for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = own[i];
  WaitForCopies<0>();
}

template <int kPending>
std::vector<uint32_t> RunCopies() {
  std::vector<uint32_t> in(256), out(256);
  for (uint32_t i = 0; i < 256; ++i) in[i] = i + 1;
  EmulateLaunch({}, {1}, {32}, CopyKernel<kPending>, in.data(), out.data());
  return out;
}

TEST(CopyEmulation, ArrivesAtTheWaitOnly) {
  const std::vector<uint32_t> all = RunCopies<0>();
  const std::vector<uint32_t> first = RunCopies<1>();
  const std::vector<uint32_t> none = RunCopies<2>();
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t want = i % 8 < 6 ? i + 1 : 0;  // of 16 bytes, 8 were read
    EXPECT_EQ(all[i], want);
    EXPECT_EQ(first[i], i % 8 < 4 ? i + 1 : ~0u);
    EXPECT_EQ(none[i], ~0u);
  }
}

// Every thread reads what its neighbour copied.
template <bool kBarrier>
void NeighbourKernel(const uint32_t* in, uint32_t* out) {
  STOCKPOT_SHARED(uint32_t, words, [64]);
  CopyAsync4(words + threadIdx.x, in + threadIdx.x);
  CommitCopies();
  WaitForCopies<0>();
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = words[63 - threadIdx.x];
}

TEST(CopyEmulation, OthersNeedABarrier) {
  std::vector<uint32_t> in(64), out(64);
  for (uint32_t i = 0; i < 64; ++i) in[i] = i;
  const auto wrong = [&] {
    int count = 0;
    for (uint32_t i = 0; i < 64; ++i) count += out[i] != 63 - i;
    return count;
  };
  EmulateLaunch({}, {1}, {64}, NeighbourKernel<true>, in.data(), out.data());
  EXPECT_EQ(wrong(), 0);
  EmulateLaunch({}, {1}, {64}, NeighbourKernel<false>, in.data(), out.data());
  EXPECT_GT(wrong(), 0);
}

// Begins the next copy into a buffer that a slower thread has not read yet.
void EarlyCopyKernel(const uint32_t* in, uint32_t* out) {
  STOCKPOT_SHARED(uint32_t, word, [1]);
  if (threadIdx.x == 0) word[0] = 7;
  __syncthreads();
  if (threadIdx.x == 0) CopyAsync4(word, in);
  out[threadIdx.x] = word[0];
  __syncthreads();
  CommitCopies();
  WaitForCopies<0>();
}

TEST(CopyEmulation, OverwritesAtOnce) {
  const std::vector<uint32_t> in = {9};
  std::vector<uint32_t> out(32);
  EmulateLaunch({}, {1}, {32}, EarlyCopyKernel, in.data(), out.data());
  EXPECT_EQ(out[1], ~0u);
}

void ForgetfulKernel(const uint32_t* in) {
  STOCKPOT_SHARED(uint32_t, word, [1]);
  CopyAsync4(word, in);
  CommitCopies();
}

void MisalignedKernel(const uint32_t* in) {
  STOCKPOT_SHARED(uint32_t, words, [8]);
  CopyAsync16(words, in + 1, 16);
}

TEST(CopyEmulation, RefusesMisuse) {
  const std::vector<uint32_t> in(8);
  EXPECT_THROW(EmulateLaunch({}, {1}, {1}, ForgetfulKernel, in.data()), std::logic_error);
  EXPECT_THROW(EmulateLaunch({}, {1}, {1}, MisalignedKernel, in.data()), std::logic_error);
}

void DynamicKernel(unsigned* out) {
  STOCKPOT_DYNAMIC_SHARED(unsigned, values);
  if (threadIdx.x == 0) out[blockIdx.x * 2] = values[0];
  values[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x * 2 + 1] = values[31];
}

TEST(DynamicSharedEmulation, IsTheBlocksAndUnwrittenAtFirst) {
  std::vector<unsigned> out(4);
  EmulateLaunch({}, {2}, {32}, 32 * sizeof(unsigned), DynamicKernel, out.data());
  EXPECT_EQ(out, (std::vector<unsigned>{0xA5A5A5A5u, 31, 0xA5A5A5A5u, 31}));
}

void ShuffleKernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(0xffffffffu, lane * lane, (lane + 3) % 32);
  out[32 + lane] = __any_sync(0xffffffffu, lane == 40);
  __syncwarp();
  out[64 + lane] = __any_sync(0xffffffffu, lane == 7);
}

TEST(WarpEmulation, ShufflesAndVotes) {
  std::vector<int> out(96);
  EmulateLaunch({ThreadOrder::kShuffled, 4}, {1}, {32}, ShuffleKernel, out.data());
  for (int lane = 0; lane < 32; ++lane) {
    const int from = (lane + 3) % 32;
    EXPECT_EQ(out[lane], from * from);
    EXPECT_EQ(out[32 + lane], 0);
    EXPECT_NE(out[64 + lane], 0);
  }
}

}  // namespace
}  // namespace stockpot
