// Products of lists of matrices for Hopper with clusters of two SMs: the kernel of mnk_cluster.py, which describes it.
//
//     c[g] = a[g] @ b[g]        a[g] [M_g, K_g]   b[g] [K_g, N_g]   c[g] [M_g, N_g]
//
// Each group has its own sizes and its own maps of a and b, in tables in global memory. WARPS_STORE of tiles.cuh is 1.

struct Sizes {
  long long offset;  // of c[g] in the buffer of all outputs, in elements, a multiple of 8
  int M, N, K, unused;
};

struct Lists {
  const TensorMap *a, *b;  // of each group
  const Sizes* sizes;
  unsigned short* out;
  const int* last;   // of each group: tiles up to its end
  int items, whole;  // items from `whole` on are halves of tiles

  __device__ __forceinline__ u64 policy() const { return 0; }

  __device__ __forceinline__ Tile tile_of(int item, int& g, const Place& place) const {
    const bool cut = item >= whole;
    const int number = cut ? whole + (item - whole) / 2 : item;
    while (number >= last[g]) ++g;
    const Sizes of = sizes[g];
    Tile tile;
    tile.group = g;
    tile.start = 0;
    tile.size = of.M;
    const int all = (of.M + ROWS - 1) / ROWS;
    const int2 at = serpentine(number - (g ? last[g - 1] : 0), (all + ITEM_PARTS - 1) / ITEM_PARTS,
                               (of.N + ITEM_COLUMNS - 1) / ITEM_COLUMNS);
    int first = at.x * ITEM_PARTS;
    int parts = min(all - first, ITEM_PARTS);
    if (cut) {
      constexpr int half = (ITEM_PARTS + 1) / 2;
      const bool second = (item - whole) % 2;
      first += second ? half : 0;
      parts = second ? max(parts - half, 0) : min(parts, half);
    }
    const int of_first = (parts + CLUSTER_M - 1) / CLUSTER_M;
    tile.parts = place.program_m ? parts - of_first : of_first;
    tile.row = (first + place.program_m * of_first) * ROWS;
    set_columns(tile, at.y, of.N, place);
    tile.steps = (of.K + BLOCK_K - 1) / BLOCK_K;
    tile.in_last_step = (of.K - (tile.steps - 1) * BLOCK_K + 15) / 16;
    return tile;
  }

  // Load this program's share of an operand's rows or columns. If K is not contiguous in it, a share is one of K, and
  // boxes have 64 rows or columns each.
  template <bool k_is_inner>
  __device__ __forceinline__ void load(const TensorMap* map, int at, int count, int step, int shares, int share, u32 to,
                                       u32 ready, unsigned short programs) const {
    const int k = step * BLOCK_K;
    if (step == 0) see_map(map);  // the host wrote it
    if (k_is_inner) {
      const int first = share * (count / shares);
      load_2d(to + first * STEP_BYTES, map, k, at + first, ready, programs);
    } else {
      const int first = share * (BLOCK_K / shares);
      for (int box = 0; box < count / 64; ++box)
        load_2d(to + box * BOX_BYTES + first * 128, map, at + box * 64, k + first, ready, programs);
    }
  }

  __device__ __forceinline__ void load_a(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    load<A_IS_MK>(a + tile.group, tile.row, PARTS * ROWS, step, CLUSTER_N, place.program_n, to, ready, place.for_row);
  }

  __device__ __forceinline__ void load_b(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    load<B_IS_NK>(b + tile.group, tile.column, COLUMNS, step, CLUSTER_M, place.program_m, to, ready, place.for_column);
  }

  // Store 16 rows of 64 columns by a whole warp, 16 bytes for each thread and access.
  __device__ __forceinline__ void store_rows(const Tile& tile, int row, int column, u32 from, int lane) const {
    const Sizes of = sizes[tile.group];
    const int part = lane % 8, at_n = column + part * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = i * 4 + lane / 8, at_m = row + line;
      const uint4 values = read_16(from + line * 128 + ((part ^ line & 7) << 4));
      unsigned short* to = out + of.offset + (long long)at_m * of.N + at_n;
      if (at_m >= of.M) continue;
      if (of.N % 8 == 0) {
        if (at_n < of.N) *(uint4*)to = values;
      } else {
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (at_n + j < of.N) to[j] = (unsigned short)(words[j / 2] >> j % 2 * 16);
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(128 * (WORKERS + 1), 1)
    cluster_mnk_kernel(const TensorMap* a,      // [G], of [M, K] or [K, M]; see load
                       const TensorMap* b,      // [G], of [N, K] or [K, N]
                       const Sizes* sizes,      // [G]
                       unsigned short* out,     // the buffer of all outputs
                       u64* counters,           // [2], of Tickets and of Lockstep
                       int G) {
  __shared__ int last[MOST_GROUPS];
  const Place place = place_of_program();
  const Shared shared = set_up(counters);
  sum_up_tiles(G, last, [&](int g) {
    return (sizes[g].M + ITEM_PARTS * ROWS - 1) / (ITEM_PARTS * ROWS) * ((sizes[g].N + ITEM_COLUMNS - 1) / ITEM_COLUMNS);
  });
  __syncthreads();
  cluster_sync();

  // The tiles of a short last wave are cut in two if there are clusters for all halves.
  const int tiles = uniform(last[G - 1]), in_last_wave = tiles % place.clusters;
  const bool cut = 2 * in_last_wave <= place.clusters;
  const Lists product = {a, b, sizes, out, last, cut ? tiles + in_last_wave : tiles, cut ? tiles - in_last_wave : tiles};
  multiply_all(product, place, shared, counters);
  __syncthreads();
  cluster_sync();  // a program's shared memory must outlive what the other one sends to it
}
