// Products of tiles on Hopper by persistent programs, in clusters of two: the code that the kernels in CUDA C++ share.
//
// A program has three groups of four warps. In the first group, one warp plans the program's tiles and one loads operands
// into stages of shared memory. They are two because a plan takes several divisions, and a load that waits for them makes
// the products wait. The other two groups multiply. They share a tile, each with every other part of 64 rows; or they take
// turns, each with a tile of its own, and one stores while the other multiplies. The programs of a cluster multiply
// neighbouring tiles. Each loads half of the operand that the tiles share, for both.
//
// Constants:
//
//     IS_FP8             1 if operands are fp8 and sums are scaled, 0 if operands have 16 bits
//     BLOCK_SCALES       1 if the sums of each step are scaled by rows and columns; of fp8
//     A_IS_MK, B_IS_NK   1 if K is contiguous in the operand, 0 if rows of A or columns of B are
//     PARTS_EACH         parts of 64 rows that a group of warps multiplies
//     COLUMNS            of a program's tile, a multiple of 64
//     TAKE_TURNS         1 if each group of warps has a tile of its own
//     CLUSTER_M, CLUSTER_N   programs of a cluster along rows and columns; one of them is 2, the other 1
//     GROUP_M            cluster tile rows of a block (tile_order.serpentine)
//     LOCKSTEP           steps of K between two waits (lockstep.py); 0: none
//     FROM_END           how many of every eight clusters take tiles from the end of the order
//     SHORT_STEPS        1 if the last step of a tile may have less than BLOCK_K of K
//     STAGES             of shared memory, each with the operands of one step
//     BUFFERS            for the output, of 16 rows and 64 columns, for each warp that multiplies
//     LEAD, ARRIVALS, POLLS   the constants of lockstep.py
//     OFFSET             type of the groups' end offsets: int or long long
//     MOST_GROUPS        that fit in shared memory
//     STORES_SUMS        1 if threads store their sums themselves, in fp32
//     WARPS_STORE        1 if whole warps store the output, 0 if TMA does

constexpr int ROWS = 64;                    // of a part: the least that wgmma multiplies
constexpr int STEP_BYTES = 128;             // of K in a row or column, the widest swizzle
constexpr int BLOCK_K = STEP_BYTES / (IS_FP8 ? 1 : 2);
constexpr int SLICES = STEP_BYTES / 32;     // of a step: wgmma multiplies 32 bytes of K
constexpr int BOX_BYTES = 64 * STEP_BYTES;  // 64 rows or columns of an operand
constexpr int WORKERS = 2;                  // groups of warps that multiply
constexpr int PLANNED = 2;                  // tiles that fit in the plan: few, so that they are taken just before their turn
constexpr int PARTS = TAKE_TURNS ? PARTS_EACH : WORKERS * PARTS_EACH;  // of a program's tile
constexpr int APART = TAKE_TURNS ? 1 : WORKERS;                        // parts from one of a worker's to its next
constexpr int PROGRAMS = CLUSTER_M * CLUSTER_N;
constexpr int ITEM_PARTS = CLUSTER_M * PARTS;  // of a cluster's tile
constexpr int ITEM_COLUMNS = CLUSTER_N * COLUMNS;
constexpr int A_BYTES = PARTS * BOX_BYTES;
constexpr int B_BYTES = COLUMNS / 64 * BOX_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SCALE_BYTES = BLOCK_SCALES ? (PARTS * ROWS + COLUMNS) * 4 : 0;  // of a step: of rows, then of columns
constexpr int OUT_ROWS = 16, OUT_COLUMNS = 64;
constexpr int CHUNKS = COLUMNS / OUT_COLUMNS;
constexpr int OUT_BYTES = OUT_ROWS * OUT_COLUMNS * 2;
constexpr int LOAD_REGISTERS = 40, MULTIPLY_REGISTERS = 232;  // 40 + 2 * 232 = 3 * 168, what a launch of 384 threads gets

constexpr int BILLION = 0x40000000;  // of maps that are ragged along M, as in triton.tools.ragged_tma

// From one wgmma to the next along K, and from 64 columns to the next 64 (unused if K is contiguous), in 16 bytes.
constexpr int A_NEXT = A_IS_MK ? 2 : 128, B_NEXT = B_IS_NK ? 2 : 128, B_LEAD = B_IS_NK ? 1 : BOX_BYTES / 16;

struct Place {
  int cluster, clusters;
  int program_m, program_n;         // this program's row and column within the cluster
  unsigned short for_row, for_column;  // masks of the programs that share its rows, or its columns; 0: none but itself
};

__device__ __forceinline__ Place place_of_program() {
  const int program = program_of_cluster();
  Place place;
  place.cluster = blockIdx.x / PROGRAMS;
  place.clusters = gridDim.x / PROGRAMS;
  place.program_m = CLUSTER_M > 1 ? program : 0;
  place.program_n = CLUSTER_N > 1 ? program : 0;
  place.for_row = CLUSTER_N > 1 ? 3 : 0;
  place.for_column = CLUSTER_M > 1 ? 3 : 0;
  return place;
}

// A program's part of an item, a cluster's tile.
struct Tile {
  int group, start, size;  // a group, its first row and its number of rows
  int row, column;         // the first of the program's tile, within the output of the group
  int parts;               // of 64 rows that the program has; 0 to PARTS
  int columns;             // that it has, a multiple of 64 up to COLUMNS
  int steps;               // of K; 0 after the last tile
  int in_last_step;        // slices of K; unused without SHORT_STEPS
};

// Set a tile's columns, given the item's number among the tile columns and all columns of the output. At the edge, the
// tiles of a cluster share the remaining columns evenly.
__device__ __forceinline__ void set_columns(Tile& tile, int item, int all, const Place& place) {
  const int first = item * ITEM_COLUMNS, blocks = (min(all - first, ITEM_COLUMNS) + 63) / 64;
  const int of_first = (blocks + CLUSTER_N - 1) / CLUSTER_N;
  tile.column = first + place.program_n * of_first * 64;
  tile.columns = 64 * (place.program_n ? blocks - of_first : of_first);
}

// Order an item's cluster tile within a group's output: see tile_order.serpentine. Return its row and its column.
__device__ __forceinline__ int2 serpentine(int inside, int tiles_m, int tiles_n) {
  const int blocks = max((tiles_m + GROUP_M / 2) / GROUP_M, 1);
  const int height = (tiles_m + blocks - 1) / blocks;
  const int block = inside / (height * tiles_n);
  inside -= block * height * tiles_n;
  const int rows = min(tiles_m - block * height, height);
  const int column = inside / rows;
  return make_int2(block * height + inside % rows, column + block % 2 * (tiles_n - 1 - 2 * column));
}

// Sum up the tiles of the groups, `tiles_of(g)`, by the first warp: `last` gets those up to each group's end.
template <class TilesOf>
__device__ __forceinline__ void sum_up_tiles(int G, int* last, const TilesOf& tiles_of) {
  if (threadIdx.x >= 32) return;
  int before = 0;
  for (int from = 0; from < G; from += 32) {
    const int g = from + threadIdx.x;
    const int tiles = before + sums_up_to(g < G ? tiles_of(g) : 0);
    if (g < G) last[g] = tiles;
    before = __shfl_sync(0xffffffff, tiles, 31);
  }
}

// Order the groups by size, the largest first: `ends` has the end of each, and `order` gets their numbers.
__device__ __forceinline__ void order_by_size(int G, const int* ends, int* order) {
  for (int g = threadIdx.x; g < G; g += blockDim.x) {
    const int size = ends[g] - (g ? ends[g - 1] : 0);
    int before = 0;  // groups before it in the order
    for (int h = 0, start = 0; h < G; start = ends[h++]) {
      const int other = ends[h] - start;
      before += other > size || (other == size && h < g);
    }
    order[before] = g;
  }
}

// A position in a ring of SIZE places in shared memory, with the phase of its barriers.
template <int SIZE>
struct Ring {
  int at;
  u32 phase;

  __device__ __forceinline__ void next() {
    if (++at == SIZE) {
      at = 0;
      phase ^= 1;
    }
  }

  __device__ __forceinline__ void skip(int count) {
    const int ahead = at + count;
    phase ^= ahead / SIZE & 1;
    at = ahead % SIZE;
  }
};

// The stages in shared memory, and the position of a group of warps among them.
struct Stages : Ring<STAGES> {
  u32 operands, full, empty;  // addresses; a barrier has 8 bytes

  __device__ __forceinline__ u32 scales() const {
    return operands + STAGES * STAGE_BYTES + 4 * WORKERS * BUFFERS * OUT_BYTES + at * SCALE_BYTES;
  }
  __device__ __forceinline__ u32 here() const { return operands + at * STAGE_BYTES; }
  __device__ __forceinline__ u32 is_full() const { return full + 8 * at; }
  __device__ __forceinline__ u32 is_empty() const { return empty + 8 * at; }
};

// A program's tiles in the order of their computation, a ring in shared memory. One thread writes it. The thread that loads
// and each warp that multiplies read all of it.
struct Plan : Ring<PLANNED> {
  Tile* tiles;
  u32 planned, taken;  // addresses of barriers

  __device__ __forceinline__ void wait_for_room() const { wait_for(taken + 8 * at, phase ^ 1); }

  // Add a tile. There must be room.
  __device__ __forceinline__ void put(const Tile& tile) {
    tiles[at] = tile;
    arrive(planned + 8 * at);
    next();
  }

  // Read the next tile, by a single thread or by a whole warp.
  template <bool whole_warp>
  __device__ __forceinline__ Tile take() {
    wait_for(planned + 8 * at, phase);
    const Tile tile = tiles[at];
    if (whole_warp) __syncwarp();
    if (!whole_warp || elected()) arrive(taken + 8 * at);
    next();
    return tile;
  }
};

// The items that a cluster takes, one after another, when it is free. Clusters count them in global memory.
//
// Most clusters take items from the front of the order, the others from its end, until they meet. If large tiles are in
// front, tiles that wait for products and tiles that wait for stores are computed at the same time.
struct Tickets {
  u32 item, sent, taken;  // addresses; of the last two, of barriers
  u64* counter;           // of tickets for items from the front, and in its upper half from the end; 0 between launches
  u32 phase;
  int count;              // of items

  __device__ __forceinline__ static bool from_end(const Place& place) { return place.cluster % 8 < FROM_END; }

  // How many of the first clusters take items from the end.
  __device__ __forceinline__ static int of_end(int clusters) {
    return clusters / 8 * FROM_END + min(clusters % 8, FROM_END);
  }

  // The item with which a cluster begins: no counting delays it.
  __device__ __forceinline__ int first(const Place& place) const {
    if (!FROM_END || count <= place.clusters) return place.cluster;
    const int before = of_end(place.cluster);
    return from_end(place) ? count - 1 - before : place.cluster - before;
  }

  // Return the next item; `count` if none is left. A cluster's first program draws a ticket and sends its item to both,
  // since they must plan the same tiles. Each item is followed by one draw, so the last draw has the number count - 1.
  __device__ __forceinline__ int next(const Place& place) {
    if (place.program_m + place.program_n == 0) {
      wait_for(taken, phase ^ 1);
      const u64 before = atomicAdd(counter, from_end(place) ? 1ull << 32 : 1ull);
      const int front = (int)before, end = (int)(before >> 32), ends = of_end(place.clusters);
      if (front + end == count - 1) *counter = 0;
      int next = from_end(place) ? count - 1 - ends - end : place.clusters - ends + front;
      if (front + end >= count - place.clusters) next = count;
      for (int program = 0; program < PROGRAMS; ++program) send(next, item, sent, program);
    }
    expect(sent, 4);
    wait_for(sent, phase);
    const int next = read(item);
    arrive_at(taken, 0);
    phase ^= 1;
    return next;
  }
};

struct Shared {
  Stages stages;
  Plan plan;
  Tickets tickets;
};

// Set the barriers up. All threads of the cluster must synchronise before they are used.
__device__ __forceinline__ Shared set_up(u64* counters) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 full[STAGES], empty[STAGES], planned[PLANNED], taken[PLANNED], sent, received;
  __shared__ Tile tiles[PLANNED];
  __shared__ int item;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      set_up_barrier(shared_address(&full[stage]), 1);
      set_up_barrier(shared_address(&empty[stage]), PROGRAMS * (TAKE_TURNS ? 1 : WORKERS) * (BLOCK_SCALES ? 4 : 1));
    }
    for (int slot = 0; slot < PLANNED; ++slot) {
      set_up_barrier(shared_address(&planned[slot]), 1);
      set_up_barrier(shared_address(&taken[slot]), 1 + 4 * WORKERS);
    }
    set_up_barrier(shared_address(&sent), 1);
    set_up_barrier(shared_address(&received), PROGRAMS);
    publish_barriers();
  }
  return {{{0, 0}, shared_address(memory), shared_address(full), shared_address(empty)},
          {{0, 0}, tiles, shared_address(planned), shared_address(taken)},
          {shared_address(&item), shared_address(&sent), shared_address(&received), counters, 0, 0}};
}

// See lockstep.py. A cluster's first program waits for those of other clusters, its second one for the first.
struct Lockstep {
  u64* arrivals;  // 0 between launches
  int clusters;
  u64 reached, seen;
  int to_arrive, to_wait, until;

  __device__ __forceinline__ Lockstep(u64* arrivals, int clusters)
      : arrivals(arrivals), clusters(clusters), reached(0), to_arrive(ARRIVALS), to_wait(ARRIVALS), until(LOCKSTEP) {}

  __device__ __forceinline__ void keep_step() {
    if (until == LEAD && to_arrive > 0) {
      atomicAdd(arrivals, 1ull);
      --to_arrive;
    }
    if (until == 1) seen = *(volatile u64*)arrivals;  // a step ahead, to hide the latency
    if (until == 0) {
      until = LOCKSTEP;
      reached += clusters;
      int polls = 0;
      if (to_wait > 0 && seen < reached)
        while (polls < POLLS && *(volatile u64*)arrivals < reached) ++polls;
      to_wait = polls < POLLS ? to_wait - 1 : 0;
    }
    --until;
  }

  // Let the others go on. The last cluster that ends sets the counter to 0.
  __device__ __forceinline__ void finish() {
    const u64 all = (u64)ARRIVALS * clusters;
    if (atomicAdd(arrivals, (u64)to_arrive) + to_arrive == all) *arrivals = 0;
  }
};

template <class Product>
__device__ __forceinline__ void plan_tiles(const Product& product, const Place& place, Plan plan, Tickets tickets) {
  int g = 0;
  tickets.count = product.items;
  for (int item = tickets.first(place); item < product.items; item = tickets.next(place)) {
    plan.put(product.tile_of(item, g, place));
    plan.wait_for_room();
  }
  plan.put({});
}

template <class Product>
__device__ __forceinline__ void load_tiles(const Product& product, const Place& place, Stages stages, Plan plan,
                                           u64* arrivals) {
  const bool leads = LOCKSTEP && place.program_m + place.program_n == 0;
  Lockstep lockstep(arrivals, place.clusters);
  stages.phase = 1;
  while (true) {
    const Tile tile = plan.take<false>();
    if (!tile.steps) break;
    for (int step = 0; step < tile.steps; ++step) {
      if (leads) lockstep.keep_step();
      wait_for(stages.is_empty(), stages.phase);
      int bytes = (tile.parts ? A_BYTES : 0) + (tile.columns ? B_BYTES : 0);
      if constexpr (BLOCK_SCALES) bytes += product.scale_bytes(tile);
      expect(stages.is_full(), bytes);
      if constexpr (BLOCK_SCALES) product.load_scales(tile, step, stages.scales(), stages.is_full());
      if (tile.parts) product.load_a(tile, step, place, stages.here(), stages.is_full());
      if (tile.columns) product.load_b(tile, step, place, stages.here() + A_BYTES, stages.is_full());
      stages.next();
    }
  }
  if (leads) lockstep.finish();
}

// A group of warps that multiplies.
struct Worker {
  Stages stages;
  int number, thread;
  int held;  // the stage that unfinished products read

  // Let both programs write into a stage again. Scales are read by each warp for itself.
  __device__ __forceinline__ void give_back(int stage) {
    if (BLOCK_SCALES) __syncwarp();
    const int program = BLOCK_SCALES ? thread % 32 : thread;
    if (program < PROGRAMS) arrive_at(stages.empty + 8 * stage, program);
  }

  // Give the stages of a tile back that has nothing for this group. A warp may come later than the others, from its stores.
  // A stage must not be given back before all warps have seen it full: filled twice more, it would look empty to the late
  // one, which would wait for ever. Where warps multiply, wgmma holds them together.
  __device__ __forceinline__ void pass(int steps) {
    for (int step = 0; step < steps; ++step) {
      wait_for(stages.is_full(), stages.phase);
      meet_warps(WORKERS + 1 + number);
      give_back(stages.at);
      stages.next();
    }
  }

  // Multiply a step of the first `count` of the worker's parts, from `part` on: all that a stage has of K if `whole`, else
  // some slices of it.
  template <int count, int columns, bool whole>
  __device__ __forceinline__ void multiply_step(float (&sums)[PARTS_EACH][COLUMNS / 2], int part, bool first, int slices) {
    wait_for(stages.is_full(), stages.phase);
    const u64 a = described(stages.here() + part * BOX_BYTES, 1);
    const u64 b = described(stages.here() + A_BYTES, B_LEAD);
    start_products();
#pragma unroll
    for (int i = 0; i < SLICES; ++i)
      if (whole || i < slices)
#pragma unroll
        for (int e = 0; e < count; ++e)
          multiply<columns>(sums[e], a + e * APART * (BOX_BYTES / 16) + A_NEXT * i, b + B_NEXT * i, !first || i);
    commit_products();
    wait_for_products<1>();
    if (!first) give_back(held);
    held = stages.at;
    stages.next();
  }

  // Multiply a step of the worker's only part, scale its sums and add them: 128 columns, then the rest. While one group of
  // warps scales, the other one multiplies.
  template <int columns, int from = 0>
  __device__ __forceinline__ void multiply_scaled(float* sums, int part, const float2& of_rows) {
    constexpr int width = columns - from < 128 ? columns - from : 128;
    const u64 a = described(stages.here() + part * BOX_BYTES, 1);
    const u64 b = described(stages.here() + A_BYTES + from * STEP_BYTES, B_LEAD);
    float of_step[width / 2];
    start_products();
#pragma unroll
    for (int i = 0; i < SLICES; ++i) multiply<width>(of_step, a + A_NEXT * i, b + B_NEXT * i, i);
    commit_products();
    wait_for_products<0>();
    const u32 scales = stages.scales() + (PARTS * ROWS + from + thread % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < width / 8; ++i) {
      float* to = sums + from / 2 + i * 4;
      const float2 of_columns = read_floats(scales + i * 32);
      to[0] += of_step[i * 4] * (of_rows.x * of_columns.x);
      to[1] += of_step[i * 4 + 1] * (of_rows.x * of_columns.y);
      to[2] += of_step[i * 4 + 2] * (of_rows.y * of_columns.x);
      to[3] += of_step[i * 4 + 3] * (of_rows.y * of_columns.y);
    }
    if constexpr (from + width < columns) multiply_scaled<columns, from + width>(sums, part, of_rows);
  }

  template <int columns>
  __device__ __forceinline__ void multiply_scaled_steps(float* sums, int part, int steps) {
    static_assert(PARTS_EACH == 1 || !BLOCK_SCALES, "registers");
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) sums[i] = 0;
    for (int step = 0; step < steps; ++step) {
      wait_for(stages.is_full(), stages.phase);
      const u32 scales = stages.scales() + (part * ROWS + thread / 32 * 16 + thread % 32 / 4) * 4;
      multiply_scaled<columns>(sums, part, make_float2(read_float(scales), read_float(scales + 32)));
      give_back(stages.at);
      stages.next();
    }
  }

  // Multiply all steps. The last products may be unfinished.
  template <int count, int columns>
  __device__ __forceinline__ void multiply_steps(float (&sums)[PARTS_EACH][COLUMNS / 2], int part, int steps,
                                                 int in_last_step) {
    if constexpr (BLOCK_SCALES) return multiply_scaled_steps<columns>(sums[0], part, steps);
    const bool is_short = SHORT_STEPS && in_last_step < SLICES;
    const int whole = steps - is_short;
    for (int step = 0; step < whole; ++step) multiply_step<count, columns, true>(sums, part, step == 0, SLICES);
    if (is_short) multiply_step<count, columns, false>(sums, part, whole == 0, in_last_step);
  }

  // The same for numbers of parts and columns that are not constants.
  template <int most_parts = PARTS_EACH, int most_columns = COLUMNS>
  __device__ __forceinline__ void multiply_tile(float (&sums)[PARTS_EACH][COLUMNS / 2], int parts, int columns, int part,
                                                int steps, int in_last_step) {
    if constexpr (most_parts > 1)
      if (parts < most_parts) return multiply_tile<most_parts - 1>(sums, parts, columns, part, steps, in_last_step);
    if constexpr (most_columns > 64)
      if (columns < most_columns)
        return multiply_tile<most_parts, most_columns - 64>(sums, parts, columns, part, steps, in_last_step);
    multiply_steps<most_parts, most_columns>(sums, part, steps, in_last_step);
  }
};

// Store a warp's 16 rows of a part, 64 columns, through the next one of its buffers, which are swizzled.
template <class Product>
__device__ __forceinline__ void store_chunk(const Product& product, const Tile& tile, int row, int column, const float* sums,
                                            u32 buffers, int& next_buffer, u64 policy) {
  const int lane = threadIdx.x % 32, line = lane % 16;
  const u32 buffer = buffers + next_buffer * OUT_BYTES;
  if (++next_buffer == BUFFERS) next_buffer = 0;
  if (elected()) wait_for_reads<BUFFERS - 1>();
  __syncwarp();
#pragma unroll
  for (int j = 0; j < 4; ++j) write_sums(buffer + line * 128 + ((2 * j + lane / 16 ^ line & 7) << 4), sums + j * 8);
  if constexpr (WARPS_STORE) {
    __syncwarp();
    product.store_rows(tile, row, column, buffer, lane);
  } else {
    publish_to_tma();
    __syncwarp();
    if (elected()) product.store(tile, row, column, buffer, policy);
  }
}

template <class Product>
__device__ __forceinline__ void multiply_tiles(const Product& product, const Shared& shared, int number) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = uniform(thread / 32);
  Worker worker = {shared.stages, number, thread, 0};
  Plan plan = shared.plan;
  const u64 policy = product.policy();
  const u32 buffers = worker.stages.operands + STAGES * STAGE_BYTES + (number * 4 + warp) * BUFFERS * OUT_BYTES;
  float sums[PARTS_EACH][COLUMNS / 2];
  int next_buffer = 0;
  int others = 1;  // steps of the other group's next tile
  if (TAKE_TURNS && number) worker.stages.skip(others = uniform(plan.take<true>().steps));
  for (bool wait = number; others; wait = true) {
    const Tile tile = plan.take<true>();
    const int part = TAKE_TURNS ? 0 : number, steps = uniform(tile.steps), columns = uniform(tile.columns);
    const int in_last_step = SHORT_STEPS ? uniform(tile.in_last_step) : 0;
    if (!steps) break;
    if (TAKE_TURNS) others = uniform(plan.take<true>().steps);
    const int count = uniform(columns ? (tile.parts + APART - 1 - part) / APART : 0);
    // They are the same for all threads, but from one tile to the next the compiler loses sight of it.
    worker.stages.at = uniform(worker.stages.at);
    worker.stages.phase = uniform(worker.stages.phase);
    if (TAKE_TURNS && wait) wait_for_group(1 + number);
    if (count)
      worker.multiply_tile(sums, count, columns, part, steps, in_last_step);
    else
      worker.pass(steps);
    if (TAKE_TURNS && others) {
      let_group_go(2 - number);
      worker.stages.skip(others);
    }
    wait_for_products<0>();
    if (count && !BLOCK_SCALES) worker.give_back(worker.held);
    if (BLOCK_SCALES && !tile.size) {  // without scales
#pragma unroll
      for (int i = 0; i < PARTS_EACH * COLUMNS / 2; ++i) sums[0][i] = 0;
    }

    // Each warp stores its 16 rows of a part by itself, 64 columns at once.
#pragma unroll
    for (int chunk = 0; chunk < PARTS_EACH * CHUNKS; ++chunk) {
      const int e = chunk / CHUNKS, i = chunk % CHUNKS;
      if (e >= count || i * OUT_COLUMNS >= columns) continue;
      const int row = tile.row + (part + e * APART) * ROWS + warp * OUT_ROWS, column = tile.column + i * OUT_COLUMNS;
      float* from = &sums[e][i * 32];
      if constexpr (IS_FP8 && !BLOCK_SCALES) product.scale(tile, row + lane / 4, column + lane % 4 * 2, from);
      if constexpr (!STORES_SUMS) store_chunk(product, tile, row, column, from, buffers, next_buffer, policy);
    }
    if constexpr (STORES_SUMS)
      if (count) product.store_sums(tile, tile.row + part * ROWS + warp * OUT_ROWS + lane / 4, lane % 4 * 2, sums[0]);
  }
  if (elected()) wait_for_stores();
}

// Multiply all items of a product. `counters` are those of Tickets and of Lockstep. The product must have:
//
//     items                              of all clusters
//     tile_of(item, g, place)            this program's tile; g is a group not after the item's, and becomes it
//     load_a, load_b(tile, step, place, to, ready)   load this program's share of an operand
//     store(tile, row, column, from, policy)         store OUT_ROWS x OUT_COLUMNS from shared memory, by one thread
//     store_rows(tile, row, column, from, lane)      the same by a warp; with WARPS_STORE, instead of `store`
//     store_sums(tile, row, column, sums)            store a thread's sums of a part; with STORES_SUMS, instead of `store`
//     scale(tile, row, column, sums)                 scale a thread's sums of OUT_ROWS x OUT_COLUMNS; of fp8 without BLOCK_SCALES
//     scale_bytes(tile), load_scales(tile, step, to, ready)   load a step's scales of rows and columns; with BLOCK_SCALES
//     policy()                           the stores' policy for L2
template <class Product>
__device__ __forceinline__ void multiply_all(const Product& product, const Place& place, const Shared& shared,
                                             u64* counters) {
  const int role = uniform(threadIdx.x / 128);
  if (role == 0) {
    give_up_registers<LOAD_REGISTERS>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0 && elected()) load_tiles(product, place, shared.stages, shared.plan, counters + 1);
    if (warp == 1 && elected()) plan_tiles(product, place, shared.plan, shared.tickets);
  } else {
    claim_registers<MULTIPLY_REGISTERS>();
    multiply_tiles(product, shared, role - 1);
  }
}
