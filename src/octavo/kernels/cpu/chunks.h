// Attention of chunks: sequences with several consecutive queries, as in prompts, in bfloat16.
//
// Part of native.cpp. Products are those of linear layers: a tile has 64 keys as outputs for the scores, and the values'
// 64 numbers of a head for their weighted sum. Where the processor has its products, weights are rounded to bfloat16; sums are float32. Tiles begin at multiples
// of 64 keys, so the bits of a query's result do not depend on where its chunk begins.

constexpr long KEY_TILE = 64, KEY_PAIRS = KEY_TILE / 2;
constexpr float SLACK = 8;  // how far a score may exceed what exponents are relative to before earlier sums shrink
constexpr long CHUNK_ROWS = 256;  // queries times heads of one task: they share the tiles of their keys and values
typedef Bfloat16Words::X Word;

// One row of K or V in bfloat16.
inline const bfloat16 *bfloat16_row(const bfloat16 *row, long, bfloat16 *) { return row; }

inline const bfloat16 *bfloat16_row(const int8_t *row, long size, bfloat16 *memory) {
    uint16_t half;
    memcpy(&half, row + size, sizeof half);
    float scale = of_float16(half);
    for (long i = 0; i < size; i++) memory[i] = narrow<bfloat16>(row[i] * scale);
    return memory;
}

// Scores of a row of queries -> weights of its keys [from, to) of a tile, and the state of its softmax. The row's weighted
// sum so far has `tiles` parts of 64 numbers, `stride` apart.
inline void weigh_keys(float *scores, int from, int to, float scale, float &highest, Floats &total, float *weighted,
                       long tiles, long stride, Word *weights) {
    constexpr int NUM = KEY_TILE / LANES;
    Floats parts[NUM], tops = Floats{} - INFINITY;
    for (int p = 0; p < NUM; p++) parts[p] = load<Floats>(scores + p * LANES) * scale;
    if (to - from < KEY_TILE) {
        Ints keys;
        for (int i = 0; i < LANES; i++) keys[i] = i;
        for (int p = 0; p < NUM; p++, keys += LANES)
            parts[p] = (keys >= from) & (keys < to) ? parts[p] : Floats{} - INFINITY;
    }
    for (int p = 0; p < NUM; p++) tops = larger(tops, parts[p]);
    float best = largest(tops);
    if (!(best <= highest + SLACK)) {
        float shrink = exp_of_negative(highest - best);
        total *= shrink, highest = best;
        for (long t = 0; t < tiles; t++)
            for (long i = 0; i < 64; i++) weighted[t * stride + i] *= shrink;
    }
    float top = highest;  // in a register, whatever is stored
    Floats sums{};
    for (int p = 0; p < NUM; p++) {
        parts[p] = exp_of_negative(parts[p] - top);
        sums += parts[p];
    }
    total += sums;
    memcpy(scores, parts, sizeof parts);
    Bfloat16Words::words(scores, KEY_TILE, weights);
}

// Attention of queries [first, last) of a chunk and the query heads of one K/V head.
template <class R> void attend_queries(const Attention &a, long seq, long head, long first, long last) {
    using K = Bfloat16Words;
    auto *q = static_cast<const bfloat16 *>(a.q);
    auto *kv_layer = static_cast<const R *>(a.kv_layer);
    auto *out = static_cast<bfloat16 *>(a.out);
    long size = a.head_dim, width = size + TAIL<R>, head_size = a.block_size * width;
    long words = size / 2, tiles = (size + 63) / 64, num_rows = (last - first) * a.group, stride = num_rows * 64;
    long before = a.seq_lens[seq] - a.counts[seq];  // keys before the chunk

    float *weighted = scratch<4>(tiles * stride + words * KEY_TILE + tiles * KEY_PAIRS * 64 +
                                 num_rows * words * sizeof(Word) / 4 + (LANES + 1) * num_rows);  // [tiles, rows, 64]
    auto *keys = reinterpret_cast<uint32_t *>(weighted + tiles * stride);    // [words, KEY_TILE]
    auto *values = keys + words * KEY_TILE;                                  // [tiles, KEY_PAIRS, 64]
    auto *total = reinterpret_cast<Floats *>(values + tiles * KEY_PAIRS * 64);  // [rows], each lane of some keys
    auto *highest = reinterpret_cast<float *>(total + num_rows);
    auto *x = reinterpret_cast<Word *>(highest + num_rows);                  // [rows, words]

    auto place = [&](long row) {  // of its head's query, among those of q
        return ((a.rows[seq] + first + row / a.group) * a.num_kv_heads + head) * a.group + row % a.group;
    };
    for (long row = 0; row < num_rows; row++) {
        float query[MAX_HEAD_DIM];
        widen(q + place(row) * size, size, query);
        K::words(query, size, x + row * words);
    }
    std::fill_n(weighted, tiles * stride, 0.0f);
    std::fill_n(highest, num_rows, -INFINITY);
    std::fill_n(total, num_rows, Floats{});

    // Keys that a query sees.
    auto begin_of = [&](long row) { return a.window ? std::max(0L, before + first + row / a.group - a.window + 1) : 0L; };
    auto end_of = [&](long row) { return before + first + row / a.group + 1; };
    for (long begin = begin_of(0) / KEY_TILE * KEY_TILE; begin < end_of(num_rows - 1); begin += KEY_TILE) {
        std::fill_n(keys, words * KEY_TILE + tiles * KEY_PAIRS * 64, 0);
        for (long j = 0; j < std::min(KEY_TILE, end_of(num_rows - 1) - begin); j++) {
            if (begin + j < begin_of(0)) continue;  // its block may be another sequence's
            long block = a.tables[seq * a.table_width + (begin + j) / a.block_size];
            const R *from = kv_layer + block * a.block_stride + head * head_size + (begin + j) % a.block_size * width;
            bfloat16 memory[MAX_HEAD_DIM];
            const bfloat16 *row = bfloat16_row(from, size, memory);
            for (long i = 0; i < words; i++) memcpy(keys + i * KEY_TILE + j, row + 2 * i, sizeof *keys);
            row = bfloat16_row(from + a.num_kv_heads * head_size, size, memory);
            for (long t = 0; t < tiles; t++) {
                uint32_t *pair = values + (t * KEY_PAIRS + j / 2) * 64;
                for (long i = 0; i < std::min(64L, size - t * 64); i++)
                    pair[i] |= uint32_t(row[t * 64 + i].bits) << j % 2 * 16;
            }
        }
        for (long row = 0; row < num_rows; row += K::ROWS) {
            long n = std::min<long>(K::ROWS, num_rows - row);
            if (end_of(row + n - 1) <= begin || begin_of(row) >= begin + KEY_TILE) continue;
            alignas(64) float scores[K::ROWS][KEY_TILE] = {};
            Word weights[K::ROWS][KEY_PAIRS] = {};
            take_rows<K, KEY_TILE, K::ROWS>(n, reinterpret_cast<const char *>(keys), x + row * words, words, words,
                                            reinterpret_cast<FloatWords *>(scores), nullptr, 0);
            for (long r = row; r < row + n; r++) {
                long from = std::max(0L, begin_of(r) - begin), to = std::min(KEY_TILE, end_of(r) - begin);
                if (from < to)
                    weigh_keys(scores[r - row], from, to, a.scale, highest[r], total[r], weighted + r * 64, tiles, stride,
                               weights[r - row]);
            }
            long pairs = std::min(KEY_PAIRS, (end_of(row + n - 1) - begin + 1) / 2);
            for (long t = 0; t < tiles; t++)
                take_rows<K, 64, K::ROWS>(n, reinterpret_cast<const char *>(values + t * KEY_PAIRS * 64), weights[0],
                                          KEY_PAIRS, pairs,
                                          reinterpret_cast<FloatWords *>(weighted + t * stride + row * 64), nullptr, 0);
        }
    }
    for (long row = 0; row < num_rows; row++) {
        float part[MAX_HEAD_DIM + 2];
        for (long t = 0; t < tiles; t++)
            std::copy_n(weighted + t * stride + row * 64, std::min(64L, size - t * 64), part + t * 64);
        part[size] = highest[row], part[size + 1] = sum(total[row]);
        float sink = a.sinks ? a.sinks[head * a.group + row % a.group] : -INFINITY;
        merge_parts(part, 1, 0, size, sink, out + place(row) * size, a.lse ? a.lse + place(row) : nullptr);
    }
}

template <class R> void chunk_attention(const Attention &a) {
    struct Task {
        long seq, head, first, last;
    };
    std::vector<Task> tasks;
    long step = std::max(1L, CHUNK_ROWS / a.group);
    for (long s = 0; s < a.num_seqs; s++)
        for (long last = a.counts[s]; last > 0; last -= step)
            for (long h = 0; h < a.num_kv_heads; h++) tasks.push_back({s, h, std::max(0L, last - step), last});
    parallel_for(long(tasks.size()), a.num_threads, [&](long i) {
        attend_queries<R>(a, tasks[i].seq, tasks[i].head, tasks[i].first, tasks[i].last);
    });
}
