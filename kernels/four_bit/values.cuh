// The values of four-bit weights in registers, and the constants of four_bit.cu, which comes after this file.
//
// Constants:
//
//     A8           1 if activations are fp8, 0 if they are bf16
//     FLOATING     1 if codes are e2m1, 0 if they are integers
//     ZEROS        1 if groups of integers have zero points
//     GROUPS       groups with a scale, along K of a block
//     ROWS         of activations in a tile: 8, or a multiple of 16 up to 256
//     BLOCKS       of weights that a group of warps multiplies
//     WORKERS      groups of four warps that multiply
//     DEPTH        blocks along K in a stage
//     BY_STAGE     1 if one access loads eight rows of a stage's activations, 0 if those in one block of K
//     STAGES, PER_SM, GROUP_M   stages of shared memory, programs on an SM, tile rows of a block (tile_order.serpentine)
//     THREADS      of a program: those that multiply, and a warp more, or four to give up registers
//     BIAS         1 if experts have a bias
//     TOKEN_SCALES 1 if each row of activations has a scale, 2 if it has one for every 128 of K, 0 if none
//     MOST_FEW     tiles of up to so many rows of activations load them by eights
//     BY_MMA       rows of bf16 activations, at most, whose products are mma's, not wgmma's
//     OFFSET, MOST_GROUPS       type of the end offsets, and how many fit in shared memory

constexpr int K_BYTES = 128;                     // of activations in a block of K, the widest swizzle
constexpr int BLOCK_K = A8 ? 128 : 64;
constexpr int CODE_BYTES = 64 * BLOCK_K / 2;
constexpr int SCALE_BYTES = FLOATING ? 64 * GROUPS : 64 * GROUPS * (2 + ZEROS);
constexpr int BLOCK_BYTES = CODE_BYTES + SCALE_BYTES;
constexpr int TILE_BLOCKS = WORKERS * BLOCKS;    // blocks of 64 rows of weights in a tile
constexpr int A_BYTES = ROWS * K_BYTES;
constexpr bool FEW = ROWS <= MOST_FEW;
constexpr int BOX_BYTES = (FEW ? 8 : ROWS) * K_BYTES;  // of activations in a block of K, for one access
constexpr int BOX_PITCH = BY_STAGE ? DEPTH * BOX_BYTES : BOX_BYTES;  // from one access's to the next one's
constexpr int DEPTH_PITCH = BY_STAGE ? BOX_BYTES : A_BYTES;  // from a block of K to the next one
constexpr bool CLAIMS = PER_SM == 1 && (WORKERS == 2 || WORKERS == 3);  // four warps give up registers to those that multiply
constexpr int W_BYTES = DEPTH * BLOCK_BYTES;     // of a stage, for a block of rows
constexpr int STAGE_BYTES = (DEPTH * A_BYTES + TILE_BLOCKS * W_BYTES + 1023) / 1024 * 1024;
constexpr int OUT_ROWS = ROWS < 16 ? 8 : 16;
constexpr int OUT_BYTES = OUT_ROWS * 128;
constexpr int BUFFERS = PER_SM > 1 ? 1 : 2;      // for the output of each group of warps
constexpr int SLICES = 4;                        // wgmma multiplies 32 bytes of K
[[maybe_unused]] constexpr bool PROMOTES = A8 && (!FLOATING || TOKEN_SCALES == 2);  // sums of a block are scaled and added
constexpr float INTEGER_UNIT = A8 && !ZEROS ? 256 : 1;  // the inverse of what e4m3's value of an integer is for 1
constexpr u32 MASK_OF_INTEGERS = 0x000F000F;
constexpr int BILLION = 0x40000000;              // of maps that are ragged along M, as in triton.tools.ragged_tma

// Multiply both values by one of a pair of scales; the instruction selects it.
__device__ __forceinline__ u32 times(u32 x, u32 scales, int of_row) {
  u32 z;
  if (of_row)
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}" : "=r"(z) : "r"(x), "r"(scales));
  else
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}" : "=r"(z) : "r"(x), "r"(scales));
  return z;
}

__device__ __forceinline__ u32 minus(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Return an address in a register. Else the compiler computes it again before each use, some 30 cycles.
__device__ __forceinline__ u32 kept(u32 address) {
  asm volatile("mov.u32 %0, %0;" : "+r"(address));
  return address;
}

__device__ __forceinline__ u32 rotated(u32 x, int left) { return __funnelshift_l(x, x, left); }

__device__ __forceinline__ u32 load32(u32 from) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ u32 load16(u32 from) {
  unsigned short value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ void load128(u32 from, u32* to) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

// The values of a thread for one block, as wgmma takes them: SLICES times four registers. A thread has the rows r and r + 8
// of its warp's 16; registers 0 and 2 belong to r, 1 and 3 to r + 8.
#if !A8
__device__ __forceinline__ void make_values(u32 block, int thread, [[maybe_unused]] u32 mask_of_integers,
                                            u32 (&values)[SLICES][4]) {
  u32 words[4];
  load128(block + thread * 16, words);
  const u32 pair = thread / 4, scales_at = block + CODE_BYTES;
#if FLOATING
  // A byte is the exponent of a power of two in bf16. The bits of e2m1 at the lower end of bf16's exponent are 2^-126 of the
  // value, subnormal numbers included; layout.py made room for that in the powers.
  const u32 bytes = load32(scales_at + pair * 4), mask = 0x81C081C0;
#pragma unroll
  for (int i = 0; i < SLICES; i += 2) {
    const u32 w = words[i], v = words[i + 1], scales = (i ? bytes >> 1 : bytes << 7) & 0x7F807F80;
    const u32 both = w & 0x06030603 | rotated(v, 2) & 0xF9FCF9FC;  // the codes for the last registers of both
    values[i][0] = times(w & mask, scales, 0);
    values[i][1] = times(w << 4 & mask, scales, 1);
    values[i][2] = times(rotated(w, 10) & mask, scales, 0);
    values[i][3] = times(both << 6 & mask, scales, 1);
    values[i + 1][0] = times(v & mask, scales, 0);
    values[i + 1][1] = times(v << 4 & mask, scales, 1);
    values[i + 1][2] = times(rotated(v, 10) & mask, scales, 0);
    values[i + 1][3] = times(rotated(both, 12) & mask, scales, 1);
  }
#else
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const u32 both = load32(scales_at + group * 128 + pair * 4);
    u32 of_first = 0x43084308, of_second = 0x43084308;  // 128 + 8
    if (ZEROS) {
      const u32 zeros = load16(scales_at + GROUPS * 128 + group * 64 + pair * 2);
      of_first = __byte_perm(zeros, 0x43, 0x4040), of_second = __byte_perm(zeros, 0x43, 0x4141);
    }
#pragma unroll
    for (int i = group * SLICES / GROUPS; i < (group + 1) * SLICES / GROUPS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)  // 0x4300 + code is 128 + code
        values[i][j] = times(minus(words[i] >> 4 * j & mask_of_integers | 0x43004300, j % 2 ? of_second : of_first), both, j % 2);
  }
#endif
}
#else
// By tables of e4m3 in shared memory, one for each power of two or each zero point; integers without zero points by arithmetic.
__device__ __forceinline__ u32 look_up(u32 low, u32 high, u32 codes) {
  u32 values;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(values) : "r"(low), "r"(high), "r"(codes));
  return values;
}

// Return bytes of ones where the upper bits of bytes are set.
__device__ __forceinline__ u32 upper_bits(u32 x) { return look_up(x, x, 0xBA98); }

__device__ __forceinline__ void make_values(u32 block, int thread, u32 tables, u32 (&values)[SLICES][4]) {
  u32 words[8];
  load128(block + thread * 32, words);
  load128(block + thread * 32 + 16, words + 4);
  [[maybe_unused]] const u32 pair = thread / 4, scales_at = block + CODE_BYTES;
#pragma unroll
  for (int i = 0; i < SLICES; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const u32 w = words[2 * i + row];
#if FLOATING
      const u32 codes = w & 0x77777777;
      const u32 at = load16(scales_at + (i * 32 + pair) * 2) >> 8 * row & 0xff;
      u32 low, high;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(tables + at * 8));
      values[i][row] = look_up(low, high, codes) | w & 0x80808080;
      values[i][row + 2] = look_up(low, high, codes >> 16) | w << 4 & 0x80808080;
#elif !ZEROS
      // A code has twice its size, less 2 if it is negative, and its sign, which here stands for 2 and e4m3's sign. The bits
      // 0 to 16 of e4m3 are so many times 2^-9.
      values[i][row] = (w & 0x01010101) * 0x82 + (w & 0x0E0E0E0E);
      values[i][row + 2] = (w >> 4 & 0x01010101) * 0x82 + (w >> 4 & 0x0E0E0E0E);
#else
      const u32 codes = w & 0x77777777, zeros_at = scales_at + GROUPS * 128 + i * GROUPS / SLICES * 64;
      const u32 zero = load16(zeros_at + pair * 2) >> 8 * row & 0xff;
      u32 table[4];
      load128(tables + zero * 16, table);
      const u32 first = upper_bits(w), second = upper_bits(w << 4);
      values[i][row] = look_up(table[0], table[1], codes) & ~first | look_up(table[2], table[3], codes) & first;
      values[i][row + 2] =
          look_up(table[0], table[1], codes >> 16) & ~second | look_up(table[2], table[3], codes >> 16) & second;
#endif
    }
  }
}
#endif
