// Quantisation to fp8 (e4m3) by rows and by columns for Hopper: the kernels of quantize_cuda.py, which describes them.
//
// A program has tiles of 128 rows and 128 columns. A thread has a piece of a tile, eight rows of eight columns, as pairs of
// 16-bit values. So it reads 16 bytes of a row, writes 8 of a quantised row, and has 8 of a quantised column: no value
// changes its thread, and columns are only put together in shared memory.
//
// Constants: IS_BF16, 1 for operands in bfloat16, 0 for float16.

typedef unsigned int u32;
typedef unsigned char u8;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SIDE = 128;  // of a tile
constexpr int EACH = 8;    // rows and columns of a piece
constexpr float SMALLEST = 1e-12f;

struct Piece { u32 pairs[EACH][EACH / 2]; };  // a pair has two columns of a row, the first one in the lower half

// Shared memory for the columns of some tiles.
template <int count>
struct Shared {
  alignas(16) u32 largest[count][WARPS][SIDE / 2];
  alignas(16) float inverse[count][SIDE];
  alignas(16) u8 values[count < 2 ? 1 : 2][SIDE * SIDE];  // column by column, of tiles in turn
};

// A thread's place in the tile: its first row and column are eight times these.
__device__ __forceinline__ int strip() { return threadIdx.x / 16; }
__device__ __forceinline__ int chunk() { return threadIdx.x % 16; }

template <bool is_bf16>
__device__ __forceinline__ float first(u32 pair) {
  if (is_bf16) return __uint_as_float(pair << 16);
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(pair));
  return value;
}

template <bool is_bf16>
__device__ __forceinline__ float second(u32 pair) {
  if (is_bf16) return __uint_as_float(pair & 0xffff0000);
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(value) : "r"(pair));
  return value;
}

template <bool is_bf16>
__device__ __forceinline__ float element(const Piece& piece, int row, int column) {
  const u32 pair = piece.pairs[row][column / 2];
  return column % 2 ? second<is_bf16>(pair) : first<is_bf16>(pair);
}

__device__ __forceinline__ u32 in_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four values in e4m3.
__device__ __forceinline__ u32 in_e4m3(float a, float b, float c, float d) {
  u32 four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// The larger ones of two pairs of magnitudes. As integers, magnitudes have the order of their values, and NaN is largest.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 most;
  asm("max.s16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

__device__ __forceinline__ u32 magnitudes(u32 pair) { return pair & 0x7fff7fff; }

// e to the power of x, and 1/x. Denormal results are 0: the quantised values are far from them.
__device__ __forceinline__ float exponential(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
}

__device__ __forceinline__ float reciprocal(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

struct Scale { float scale, inverse; };

// The scale for a largest magnitude, rounded as in quantize.py; NaN stays NaN.
__device__ __forceinline__ Scale scale_of(float amax) {
  const float scale = (amax < SMALLEST ? SMALLEST : amax) * (1.0f / 448);
  return {scale, __fdiv_rn(1.0f, scale)};
}

__device__ __forceinline__ u32 exchange(u32 value, int distance) { return __shfl_xor_sync(0xffffffff, value, distance); }

// A piece's rows are shared by 16 threads. The row of which a thread knows the sum or the scale, with one more thread:
__device__ __forceinline__ int own_row() { return threadIdx.x % 16 / 2; }

// The largest magnitudes of a row, the thread's own. Each exchange leaves a thread half of the rows.
__device__ __forceinline__ u32 largest_of_row(const Piece& piece) {
  const int lane = threadIdx.x;
  u32 of_two[EACH / 2];  // of two rows each
#pragma unroll
  for (int i = 0; i < EACH / 2; ++i) {
    u32 most[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u32* pairs = piece.pairs[2 * i + j];
      most[j] = larger(larger(magnitudes(pairs[0]), magnitudes(pairs[1])), larger(magnitudes(pairs[2]), magnitudes(pairs[3])));
    }
    of_two[i] = larger(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
  }
  const bool upper = lane & 8, next = lane & 4;
  const u32 a = larger(upper ? of_two[2] : of_two[0], exchange(upper ? of_two[0] : of_two[2], 8));
  const u32 b = larger(upper ? of_two[3] : of_two[1], exchange(upper ? of_two[1] : of_two[3], 8));
  u32 most = larger(next ? b : a, exchange(next ? a : b, 4));
  most = larger(most, exchange(most, 2));
  most = larger(most, exchange(most, 1));
  return lane & 2 ? most >> 16 : most & 0xffff;
}

// The sum, or another operation, over a row of 128 columns, the thread's own.
template <class Value, class Operation>
__device__ __forceinline__ Value over_row(const Value (&of_rows)[EACH], const Operation& with) {
  const int lane = threadIdx.x;
  Value four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    four[i] = with(lane & 8 ? of_rows[i + 4] : of_rows[i],
                   __shfl_xor_sync(0xffffffff, lane & 8 ? of_rows[i] : of_rows[i + 4], 8));
#pragma unroll
  for (int i = 0; i < 2; ++i)
    two[i] = with(lane & 4 ? four[i + 2] : four[i], __shfl_xor_sync(0xffffffff, lane & 4 ? four[i] : four[i + 2], 4));
  const Value one = with(lane & 2 ? two[1] : two[0], __shfl_xor_sync(0xffffffff, lane & 2 ? two[0] : two[1], 2));
  return with(one, __shfl_xor_sync(0xffffffff, one, 1));
}

__device__ __forceinline__ uint2 eight_in_e4m3(const float (&x)[EACH]) {
  return make_uint2(in_e4m3(x[0], x[1], x[2], x[3]), in_e4m3(x[4], x[5], x[6], x[7]));
}

// Write the tile's first `count` rows, quantised; `value(row, column)` is one of the piece. `q` is the tile's first value.
template <class Value>
__device__ __forceinline__ void write_rows(const Value& value, const float (&inverse)[EACH], u8* q, long long stride, int count) {
  q += strip() * EACH * stride + chunk() * EACH;
  count -= strip() * EACH;
#pragma unroll
  for (int i = 0; i < EACH; ++i, q += stride) {
    float x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) x[j] = value(i, j) * inverse[i];
    if (i < count) __stcs((uint2*)q, eight_in_e4m3(x));
  }
}

// Write the tile's first `count` rows with the scales of threads' own rows. `scale` is the place for the first row's.
template <class Value>
__device__ __forceinline__ void write_rows(const Value& value, const Scale& own, u8* q, long long stride, float* scale, int count) {
  const int row = strip() * EACH + own_row();
  if (threadIdx.x % 2 == 0 && row < count) scale[row] = own.scale;
  float inverse[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) inverse[i] = __shfl_sync(0xffffffff, own.inverse, threadIdx.x % 32 / 16 * 16 + 2 * i);
  write_rows(value, inverse, q, stride, count);
}

// Quantise a piece's columns into shared memory.
template <bool is_bf16>
__device__ __forceinline__ void put_columns(const Piece& piece, const float (&inverse)[EACH], u8* values) {
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    float x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = element<is_bf16>(piece, i, j) * inverse[j];
    u8* to = values + (chunk() * EACH + j) * SIDE + ((strip() ^ chunk()) << 3);  // swizzled, for the banks
    *(uint2*)to = eight_in_e4m3(x);
  }
}

// Write the tile's columns from shared memory, by all threads. `q` is the tile's first value.
__device__ __forceinline__ void write_columns(const u8* values, u8* q, long long stride) {
  const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 16, part = threadIdx.x % 16;
  q += first * stride + part * 8;
#pragma unroll
  for (int i = 0; i < EACH; ++i, q += 2 * stride) {
    const int column = first + 2 * i;
    __stcs((uint2*)q, *(const uint2*)(values + column * SIDE + ((part ^ column / EACH) << 3)));
  }
}

// Quantise the tile by rows.
template <bool is_bf16>
__device__ __forceinline__ void by_rows(const Piece& piece, u8* q, long long stride, float* scale, int count) {
  const Scale own = scale_of(first<is_bf16>(largest_of_row(piece)));
  write_rows([&](int i, int j) { return element<is_bf16>(piece, i, j); }, own, q, stride, scale, count);
}

// Let the compiler forget what it computed from a piece: kept as floats, the values would not fit in registers.
__device__ __forceinline__ void forget(Piece& piece) {
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < EACH / 2; ++j) asm volatile("" : "+r"(piece.pairs[i][j]));
}

// Places for a tile's first quantised value and its first column's scale.
struct Columns {
  u8* q;
  float* scale;
};

// Quantise tiles by columns, by all threads.
template <bool is_bf16, int count>
__device__ __forceinline__ void by_columns(Piece (&pieces)[count], Shared<count>& shared, const Columns (&to)[count],
                                           long long stride) {
#pragma unroll
  for (int tile = 0; tile < count; ++tile) {
    const Piece& piece = pieces[tile];
    u32 most[EACH / 2];
#pragma unroll
    for (int j = 0; j < EACH / 2; ++j) {
      most[j] = magnitudes(piece.pairs[0][j]);
#pragma unroll
      for (int i = 1; i < EACH; ++i) most[j] = larger(most[j], magnitudes(piece.pairs[i][j]));
      most[j] = larger(most[j], exchange(most[j], 16));
    }
    if (threadIdx.x % 32 < 16)
      *(uint4*)&shared.largest[tile][threadIdx.x / 32][chunk() * 4] = make_uint4(most[0], most[1], most[2], most[3]);
  }
  __syncthreads();
  if (threadIdx.x < SIDE) {
#pragma unroll
    for (int tile = 0; tile < count; ++tile) {
      u32 largest = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp)
        largest = larger(largest, ((const unsigned short*)shared.largest[tile][warp])[threadIdx.x]);
      const Scale of = scale_of(first<is_bf16>(largest));
      to[tile].scale[threadIdx.x] = of.scale;
      shared.inverse[tile][threadIdx.x] = of.inverse;
    }
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < count; ++tile) {
    float inverse[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) inverse[j] = shared.inverse[tile][chunk() * EACH + j];
    forget(pieces[tile]);
    put_columns<is_bf16>(pieces[tile], inverse, shared.values[tile % 2]);
    __syncthreads();
    write_columns(shared.values[tile % 2], to[tile].q, stride);
  }
}

__device__ __forceinline__ void put(u32 (&pairs)[EACH / 2], const uint4& words) {
  pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
}

// A piece on its way from memory, while the program works on the one before. A thread takes only what it asked for itself,
// so no thread waits for another one.
struct Coming { alignas(16) uint4 words[EACH][THREADS]; };

// Ask for eight values of a row of the piece, zeros if it is not inside.
__device__ __forceinline__ void ask(Coming& coming, int row, const unsigned short* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
               "r"((u32)__cvta_generic_to_shared(&coming.words[row][threadIdx.x])), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Ask for a piece of a matrix. `from` is its first row.
__device__ __forceinline__ void ask(Coming& coming, const unsigned short* from, long long stride, int rows) {
#pragma unroll
  for (int i = 0; i < EACH; ++i, from += stride) ask(coming, i, from, i < rows);
}

__device__ __forceinline__ void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void take(Piece& piece, const Coming& coming) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) put(piece.pairs[i], coming.words[i][threadIdx.x]);
}

// Rows of x, gathered, by rows and, if q_t is not null, by columns.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    rows_kernel(const unsigned short* x,  // [T, K]
                const int* source,        // [M]: the flat choice of each row
                const int2* blocks,       // [P/128]: first row and number of rows
                u8* q, float* scale,      // [M, K], [K/128, M]
                u8* q_t, float* scale_t,  // [K, P], [P/128, K]
                int scale_stride, int K, int P, int x_stride, int q_stride, int choices, int tiles) {
  extern __shared__ __align__(16) u8 memory[];
  Coming& coming = *(Coming*)memory;
  Shared<1>& shared = *(Shared<1>*)(memory + sizeof(Coming));
  int* tokens = (int*)(memory + sizeof(Coming) + sizeof(Shared<1>));
  const int row_blocks = P / SIDE, block = blockIdx.x % row_blocks, from = blockIdx.x / row_blocks * tiles;
  const int start = blocks[block].x, count = blocks[block].y, end = min(from + tiles, K / SIDE);
  if (!count) return;
  if (threadIdx.x < SIDE) tokens[threadIdx.x] = threadIdx.x < count ? source[start + threadIdx.x] / choices : 0;
  __syncthreads();
  u32 places[EACH];  // in units of 16 bytes
#pragma unroll
  for (int i = 0; i < EACH; ++i) places[i] = tokens[strip() * EACH + i] * (u32)(x_stride / EACH) + chunk();
  const auto ask_for = [&](int at) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      ask(coming, i, x + (unsigned long long)(places[i] + at * (SIDE / EACH)) * EACH, strip() * EACH + i < count);
    asked();
  };
  ask_for(from);
  for (int at = from; at < end; ++at) {
    Piece pieces[1];
    wait();
    take(pieces[0], coming);
    if (at + 1 < end) ask_for(at + 1);
    by_rows<IS_BF16>(pieces[0], q + (long long)start * q_stride + at * SIDE, q_stride, scale + (long long)at * scale_stride + start, count);
    const Columns to[1] = {{q_t + (long long)at * SIDE * P + block * SIDE, scale_t + (long long)block * K + at * SIDE}};
    if (q_t) by_columns<IS_BF16>(pieces, shared, to, P);
  }
}

// SwiGLU by rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    swiglu_kernel(const unsigned short* both,  // [M, 2F]
                  const int2* blocks,          // [P/128]
                  u8* q, float* scale,         // [M, F], [F/128, M]
                  int scale_stride, int F, int P, int q_stride, int tiles) {
  extern __shared__ __align__(16) u8 memory[];
  Coming* coming = (Coming*)memory;
  const int row_blocks = P / SIDE, block = blockIdx.x % row_blocks, from = blockIdx.x / row_blocks * tiles;
  const int start = blocks[block].x, count = blocks[block].y, end = min(from + tiles, F / SIDE);
  if (!count) return;
  const unsigned short* place = both + (long long)(start + strip() * EACH) * 2 * F + chunk() * EACH;
  const auto ask_for = [&](int at) {
    for (int half = 0; half < 2; ++half) ask(coming[half], place + at * SIDE + half * F, 2 * F, count - strip() * EACH);
    asked();
  };
  ask_for(from);
  for (int at = from; at < end; ++at) {
    Piece gate, up;
    wait();
    take(gate, coming[0]);
    take(up, coming[1]);
    if (at + 1 < end) ask_for(at + 1);
    float act[EACH][EACH];
    u32 largest[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      largest[i] = 0;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const float g = element<IS_BF16>(gate, i, j);
        act[i][j] = g * reciprocal(1.0f + exponential(-g)) * element<IS_BF16>(up, i, j);
        largest[i] = max(largest[i], __float_as_uint(act[i][j]) & 0x7fffffff);
      }
    }
    const Scale own = scale_of(__uint_as_float(over_row(largest, [](u32 a, u32 b) { return a > b ? a : b; })));
    write_rows([&](int i, int j) { return act[i][j]; }, own, q + (long long)start * q_stride + at * SIDE, q_stride,
               scale + (long long)at * scale_stride + start, count);
  }
}

// The gradient of SwiGLU, by rows and by columns; swiglu.py has the formulas. Values are rounded to bfloat16 in between.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    swiglu_backward_kernel(const unsigned short* both,    // [M, 2F]
                           const unsigned short* da,      // [M, F]
                           const float* weights,          // [M] by flat choice
                           const int* source,             // [M]
                           const int2* blocks,            // [P/128]
                           u8* q, float* scale,           // dboth: [M, 2F], [2F/128, M]
                           u8* q_t, float* scale_t,       // dboth: [2F, P], [P/128, 2F]
                           u8* weighted, float* scale_w,  // weights * act: [F, P], [P/128, F]
                           float* sums,                   // [F/128, M]: of da * act
                           int scale_stride, int F, int P, int q_stride, int tiles) {
  extern __shared__ __align__(16) u8 memory[];
  Coming* coming = (Coming*)memory;  // of the gate and of up
  Shared<3>& shared = *(Shared<3>*)(memory + 2 * sizeof(Coming));
  float* of_rows = (float*)(memory + 2 * sizeof(Coming) + sizeof(Shared<3>));
  const int row_blocks = P / SIDE, block = blockIdx.x % row_blocks, from = blockIdx.x / row_blocks * tiles;
  const int start = blocks[block].x, count = blocks[block].y, end = min(from + tiles, F / SIDE);
  if (!count) return;
  if (threadIdx.x < SIDE) of_rows[threadIdx.x] = threadIdx.x < count ? weights[source[start + threadIdx.x]] : 0;
  const int rows = count - strip() * EACH;
  const unsigned short* place = both + (long long)(start + strip() * EACH) * 2 * F + chunk() * EACH;
  const unsigned short* da_place = da + (long long)(start + strip() * EACH) * F + chunk() * EACH;
  const auto ask_for = [&](int at) {
    for (int half = 0; half < 2; ++half) ask(coming[half], place + at * SIDE + half * F, 2 * F, rows);
    asked();
  };
  ask_for(from);
  __syncthreads();
  for (int at = from; at < end; ++at) {
    Piece pieces[3];  // first the operands, then the results
    Piece &gate = pieces[0], &up = pieces[1], &act = pieces[2];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      put(act.pairs[i], i < rows ? __ldcs((const uint4*)(da_place + at * SIDE + (long long)i * F)) : make_uint4(0, 0, 0, 0));
    wait();
    take(gate, coming[0]);
    take(up, coming[1]);
    if (at + 1 < end) ask_for(at + 1);
    float products[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float w = of_rows[strip() * EACH + i];
      products[i] = 0;
#pragma unroll
      for (int pair = 0; pair < EACH / 2; ++pair) {
        float dgate[2], dup[2], weighted_act[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float g = element<IS_BF16>(gate, i, 2 * pair + j), u = element<IS_BF16>(up, i, 2 * pair + j);
          float d = element<IS_BF16>(act, i, 2 * pair + j);
          const float s = reciprocal(1.0f + exponential(-g)), silu = g * s;
          products[i] += d * (silu * u);
          weighted_act[j] = silu * u * w;
          d *= w;
          dup[j] = d * silu;
          dgate[j] = d * u * s * (1 + g * (1 - s));
        }
        gate.pairs[i][pair] = in_bf16(dgate[0], dgate[1]);
        up.pairs[i][pair] = in_bf16(dup[0], dup[1]);
        act.pairs[i][pair] = in_bf16(weighted_act[0], weighted_act[1]);
      }
    }
    for (Piece& piece : pieces) forget(piece);
    const float sum = over_row(products, [](float a, float b) { return a + b; });
    const int row = strip() * EACH + own_row();
    if (threadIdx.x % 2 == 0 && row < count) sums[(long long)at * scale_stride + start + row] = sum;
    const int F_blocks = F / SIDE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = at + half * F_blocks;
      by_rows<true>(pieces[half], q + (long long)start * q_stride + column * SIDE, q_stride,
                    scale + (long long)column * scale_stride + start, count);
    }
    const long long to_gate = (long long)at * SIDE * P + block * SIDE, scale_of_gate = (long long)block * 2 * F + at * SIDE;
    const Columns to[3] = {{q_t + to_gate, scale_t + scale_of_gate},
                           {q_t + to_gate + (long long)F * P, scale_t + scale_of_gate + F},
                           {weighted + to_gate, scale_w + (long long)block * F + at * SIDE}};
    by_columns<true>(pieces, shared, to, P);
  }
}

// Weights with a scale for each tile, as they are and transposed.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    weights_kernel(const unsigned short* w,   // [G, N, K]
                   u8* q, u8* q_t,            // [G, N, K], [G, K, N]
                   float* scale, float* scale_t,  // [G, N/128, K/128], [G, K/128, N/128]
                   int N, int K) {
  __shared__ Shared<1> shared;
  const int n_blocks = N / SIDE, k_blocks = K / SIDE;
  const int k = blockIdx.x % k_blocks, n = blockIdx.x / k_blocks % n_blocks;
  const long long g = blockIdx.x / k_blocks / n_blocks;
  Piece piece;
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    put(piece.pairs[i], __ldg((const uint4*)(w + (g * N + n * SIDE + strip() * EACH + i) * K + k * SIDE + chunk() * EACH)));
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < EACH / 2; ++j) most = larger(most, magnitudes(piece.pairs[i][j]));
  most = larger(most, most >> 16);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) most = larger(most, exchange(most, distance));
  if (threadIdx.x % 32 == 0) shared.largest[0][threadIdx.x / 32][0] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) most = larger(most, shared.largest[0][warp][0]);
  const Scale of = scale_of(first<IS_BF16>(most & 0xffff));
  if (threadIdx.x == 0) scale[blockIdx.x] = of.scale, scale_t[(g * k_blocks + k) * n_blocks + n] = of.scale;
  float inverse[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) inverse[i] = of.inverse;
  write_rows([&](int i, int j) { return element<IS_BF16>(piece, i, j); }, inverse, q + (g * N + n * SIDE) * K + k * SIDE, K, SIDE);
  put_columns<IS_BF16>(piece, inverse, shared.values[0]);
  __syncthreads();
  write_columns(shared.values[0], q_t + (g * K + k * SIDE) * N + n * SIDE, N);
}
