// Row softmax and its gradient for Hopper, a cluster of programs for each row: the kernels of softmax_cluster.py, which
// describes them.
//
// Constants: ELEMENT, 0 for float32, 1 for bfloat16, 2 for float16; PROGRAMS of a cluster; THREADS of a program; PIECES
// of 16 bytes that a thread keeps in registers, of each operand; CHUNKS of STEP pieces of each thread in shared memory,
// for the forward kernel. Without chunks, the source is the backward kernel.

constexpr int WARPS = THREADS / 32;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int WORDS = 4;                         // of a piece
constexpr int IN_WORD = ELEMENT == 0 ? 1 : 2;    // elements
constexpr u32 LOWEST = ELEMENT == 0 ? 0xff800000 : ELEMENT == 1 ? 0xff80ff80 : 0xfc00fc00;  // minus infinity

struct Piece { u32 words[WORDS]; };

__device__ __forceinline__ Piece load(const Piece* from) {
  Piece piece;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(piece.words[0]), "=r"(piece.words[1]),
               "=r"(piece.words[2]), "=r"(piece.words[3]) : "l"(from));
  return piece;
}

__device__ __forceinline__ void store(Piece* to, const Piece& piece) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(piece.words[0]),
               "r"(piece.words[1]), "r"(piece.words[2]), "r"(piece.words[3]) : "memory");
}

template <int number>
__device__ __forceinline__ float element(u32 word) {
  if (ELEMENT == 0) return __uint_as_float(word);
  if (ELEMENT == 1) return __uint_as_float(number ? word & 0xffff0000 : word << 16);
  float value;
  if (number)
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(value) : "r"(word));
  else
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(word));
  return value;
}

__device__ __forceinline__ u32 word_of(float first, float second) {
  if (ELEMENT == 0) return __float_as_uint(first);
  u32 word;
  if (ELEMENT == 1)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// The larger values of two words. A NaN is passed over: it turns the sum of powers into NaN.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  if (ELEMENT == 0) return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  u32 most;
  if (ELEMENT == 1)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// A maximum, and a sum of powers relative to it. It starts as that of no elements.
struct Powers {
  float top = -3.40282347e38f, sum = 0;  // finite: inf - inf would be NaN

  __device__ __forceinline__ Powers with(const Powers& other) const {
    const float higher = fmaxf(top, other.top);
    return {higher, sum * power_of_2(top - higher) + other.sum * power_of_2(other.top - higher)};
  }
  __device__ __forceinline__ Powers of_thread(int distance) const {
    return {__shfl_xor_sync(0xffffffff, top, distance), __shfl_xor_sync(0xffffffff, sum, distance)};
  }
};

struct Sum {
  float sum = 0;

  __device__ __forceinline__ Sum with(const Sum& other) const { return {sum + other.sum}; }
  __device__ __forceinline__ Sum of_thread(int distance) const { return {__shfl_xor_sync(0xffffffff, sum, distance)}; }
};

template <class Result>
__device__ __forceinline__ Result of_warp(Result result) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) result = result.with(result.of_thread(distance));
  return result;
}

// Let the cluster's other programs write to this one's shared memory, once `of_cluster` has waited for them.
__device__ __forceinline__ void announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// Put together the results of all threads of a cluster, always in the same order. Each warp writes its own into the shared
// memory of every program, so that there is a single barrier.
template <class Result>
__device__ __forceinline__ Result of_cluster(Result result, Result* of_warps) {
  constexpr int count = WARPS * PROGRAMS;
  result = of_warp(result);
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < PROGRAMS) {
    const u32 here = (u32)__cvta_generic_to_shared(of_warps + blockIdx.x % PROGRAMS * WARPS + warp);
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
#pragma unroll
    for (int word = 0; word < sizeof(Result) / 4; ++word)
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there + word * 4), "f"(((float*)&result)[word]) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  result = Result();
  for (int number = lane; number < count; number += 32) result = result.with(of_warps[number]);
  return of_warp(result);
}

// A thread's pieces: `start`, `start` + THREADS, ... A program's part of a row ends after `count` pieces from `start` on.
struct Part {
  long long start;
  int count;
};

__device__ __forceinline__ Part part_of_thread(int pieces) {
  const int each = (pieces + PROGRAMS - 1) / PROGRAMS, first = blockIdx.x % PROGRAMS * each + threadIdx.x;
  return {(long long)(blockIdx.x / PROGRAMS) * pieces + first, min(each - (int)threadIdx.x, pieces - first)};
}

__device__ __forceinline__ void load_part(Piece* kept, const Piece* from, const Part& part, u32 past_the_end) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    kept[i] = i * THREADS < part.count ? load(from + part.start + i * THREADS)
                                       : Piece{past_the_end, past_the_end, past_the_end, past_the_end};
}

// Keep the compiler from keeping the floats that it has made of the pieces: they take twice the registers. `zero` is a 0 it
// does not know.
__device__ __forceinline__ void convert_again(Piece* kept, u32 zero) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
#pragma unroll
    for (int word = 0; word < WORDS; ++word) kept[i].words[word] ^= zero;
}

__device__ __forceinline__ u32 unknown_zero() {
  u32 bytes;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes - CHUNKS * STEP * THREADS * 16;
}

#if CHUNKS
// Add some pieces to a thread's maximum and sum.
template <int count>
__device__ __forceinline__ void add(Powers& powers, const Piece* pieces) {
  u32 largest = LOWEST;
#pragma unroll
  for (int i = 0; i < count; ++i)
#pragma unroll
    for (int word = 0; word < WORDS; ++word) largest = larger(largest, pieces[i].words[word]);
  const float top = fmaxf(powers.top, LOG2_E * fmaxf(element<0>(largest), element<IN_WORD - 1>(largest)));
  powers = {top, powers.sum * power_of_2(powers.top - top)};
#pragma unroll
  for (int i = 0; i < count; ++i)
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      powers.sum += power_of_2(fmaf(element<0>(pieces[i].words[word]), LOG2_E, -top));
      if (IN_WORD > 1) powers.sum += power_of_2(fmaf(element<IN_WORD - 1>(pieces[i].words[word]), LOG2_E, -top));
    }
}

// 2^(x - log2(sum)) is 2^x / sum. The row's largest value was rounded once, so x minus it is exact.
__device__ __forceinline__ Piece softmax(Piece piece, float top, float shift) {
#pragma unroll
  for (int word = 0; word < WORDS; ++word) {
    const u32 of = piece.words[word];
    piece.words[word] = word_of(power_of_2(fmaf(element<0>(of), LOG2_E, -top) + shift),
                                power_of_2(fmaf(element<IN_WORD - 1>(of), LOG2_E, -top) + shift));
  }
  return piece;
}

__device__ __forceinline__ Piece read_piece(u32 from) {
  const uint4 words = read_16(from);
  return {words.x, words.y, words.z, words.w};
}

// A program's part of a row begins in shared memory, where TMA writes it in chunks, and ends in registers.
extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(THREADS, 2)
    softmax_kernel(const Piece* x, Piece* y, int pieces) {
  constexpr int CHUNK = THREADS * STEP;  // pieces
  constexpr int IN_SHARED = CHUNKS * CHUNK;
  extern __shared__ __align__(128) char shared[];
  __shared__ alignas(8) u64 ready[CHUNKS + 1];
  __shared__ Powers of_warps[WARPS * PROGRAMS];
  announce();
  const Part part = part_of_thread(pieces);
  const int count = part.count + threadIdx.x;  // of the program; negative if other programs have the whole row
  const u32 here = shared_address(shared) + threadIdx.x * 16;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CHUNKS; ++i) set_up_barrier(shared_address(ready + i), 1);
    publish_barriers();
    for (int i = 0; i < CHUNKS && i * CHUNK < count; ++i) {
      const int bytes = min(CHUNK, count - i * CHUNK) * 16;
      expect(shared_address(ready + i), bytes);
      copy(here + i * CHUNK * 16, x + part.start + i * CHUNK, bytes, shared_address(ready + i));
    }
  }
  Piece kept[PIECES + 1];  // no array may be empty
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int at = IN_SHARED + i * THREADS;
    kept[i] = at < part.count ? load(x + part.start + at) : Piece{LOWEST, LOWEST, LOWEST, LOWEST};
  }
  __syncthreads();

  // In powers of two, relative to the thread's own largest value until the row's is known.
  Powers powers;
#pragma unroll 1
  for (int first = 0, i = 0; i < CHUNKS && first < count; first += CHUNK, ++i) {
    wait_for(shared_address(ready + i), 0);
    Piece chunk[STEP];
#pragma unroll
    for (int step = 0; step < STEP; ++step) {
      const int at = first + step * THREADS;
      chunk[step] = at < part.count ? read_piece(here + at * 16) : Piece{LOWEST, LOWEST, LOWEST, LOWEST};
    }
    add<STEP>(powers, chunk);
  }
  add<PIECES>(powers, kept);
  powers = of_cluster(powers, of_warps);
  convert_again(kept, unknown_zero());

  const float shift = -log2f(powers.sum);
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const int at = IN_SHARED + i * THREADS;
    if (at < part.count) store(y + part.start + at, softmax(kept[i], powers.top, shift));
  }
#pragma unroll 2
  for (int at = 0; at < IN_SHARED && at < part.count; at += THREADS)
    store(y + part.start + at, softmax(read_piece(here + at * 16), powers.top, shift));
}
#else
extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(THREADS, 1)
    softmax_backward_kernel(const Piece* y, const Piece* dy, Piece* dx, int pieces) {
  announce();
  const Part part = part_of_thread(pieces);
  Piece kept_y[PIECES], kept_dy[PIECES];
  load_part(kept_y, y, part, 0);
  load_part(kept_dy, dy, part, 0);

  Sum products;
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const u32 of_y = kept_y[i].words[word], of_dy = kept_dy[i].words[word];
      products.sum = fmaf(element<0>(of_y), element<0>(of_dy), products.sum);
      if (IN_WORD > 1) products.sum = fmaf(element<IN_WORD - 1>(of_y), element<IN_WORD - 1>(of_dy), products.sum);
    }
  __shared__ Sum of_warps[WARPS * PROGRAMS];
  products = of_cluster(products, of_warps);
  convert_again(kept_y, unknown_zero());
  convert_again(kept_dy, unknown_zero());
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const u32 of_y = kept_y[i].words[word], of_dy = kept_dy[i].words[word];
      kept_y[i].words[word] =
          word_of(element<0>(of_y) * (element<0>(of_dy) - products.sum),
                  element<IN_WORD - 1>(of_y) * (element<IN_WORD - 1>(of_dy) - products.sum));
    }
    if (i * THREADS < part.count) store(dx + part.start + i * THREADS, kept_y[i]);
  }
}
#endif
