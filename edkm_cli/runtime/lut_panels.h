/* Products of bfloat16 pairs with more than FEW_TOKENS tokens. Included by lut_pairs.h.
 *
 * 16 rows of W are decoded into the L1 cache, up to 640 columns of them, and multiplied with panels of 16 tokens: a lane is a
 * token, a pair of weights is broadcast, and nothing has to be summed across lanes. Panels share the decoding. A product
 * loads its weights, so that two of them a cycle are the limit of processors with two loads a cycle. Rows of the buffer are
 * an odd number of cache lines apart: a power of two would put all of them into the same few sets of the cache.
 */
#define PANEL_DEPTH 256
#define PANEL_ROW (PANEL_DEPTH + 32) /* words, or floats */
#define SHARED_PANELS 64             /* that share a decoding */

/* Decoded weights: words, or, where they are multiplied one by one, floats: of each 32 weights the odd ones first. */
#define AMX_PANELS 4 /* that are multiplied with a tile of W */

typedef union {
    uint16_t words[UNIT][PANEL_ROW];
    float floats[UNIT][PANEL_ROW];
} Decoded;

INLINE void put_weights(int fma, Decoded *w, int64_t row, int64_t at, __m512i weights) {
    if (!fma) {
        _mm512_store_si512(w->words[row] + at, weights);
        return;
    }
    _mm512_store_si512(w->floats[row] + at, _mm512_and_si512(weights, _mm512_set1_epi32((int)0xffff0000)));
    _mm512_store_si512(w->floats[row] + at + LANES, _mm512_slli_epi32(weights, 16));
}

/* Vectors of 32 weights that decoding `columns` columns gives. */
INLINE int64_t vectors_of(const Call *call, int64_t columns) {
    int64_t left = columns % RUN;
    if (call->meaning != SMALL) return (columns + WIDE - 1) / WIDE * 2;
    return columns / RUN * 4 + (left > RUN / 2 ? 4 : left ? 2 : 0);
}

/* Columns [from, end) of rows [row, row + count) of W, codes of at most four bits; `from` is a multiple of RUN. */
INLINE void decode_small(
    int tiles, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end, Decoded *w
) {
    int64_t step = RUN * call->bits / 8, in_row = row_bytes(call);
    const Words words = *u;
    const int fma = multiply_by == ONES;
    __m512i tables[PANEL_DEPTH / RUN], table = _mm512_setzero_si512();
    RowTables of_rows;
    if (tiles == WHOLE) prepare_tables(&of_rows, part, call->bits, row, count);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        if (tiles == HALVES && (r == 0 || (row + r) % part->tile_rows == 0))
            tables_of_row(call, part, row + r, from, end, tables);
        if (tiles == WHOLE) table = next_table(&of_rows, r + 1 == count);
        __m512i out[4], *block = tables;
        int64_t column = from, to = 0;
        for (; column + RUN <= end; column += RUN, p += step, to += RUN) {
            decode_block(tiles, &words, call, part, row + r, column, RUN, p, tiles == HALVES ? *block++ : table, out);
            for (int k = 0; k < 4; k++) put_weights(fma, w, r, to + 32 * k, out[k]);
        }
        if (column == end) continue;
        decode_block(tiles, &words, call, part, row + r, column, end - column, p, tiles == HALVES ? *block : table, out);
        for (int k = 0; k < 4; k++)
            if (k < 2 || end - column > RUN / 2) put_weights(fma, w, r, to + 32 * k, out[k]);
    }
}

/* The same for wider codes and for levels. */
INLINE void decode_large(
    int vectors, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end,
    Decoded *w
) {
    int64_t in_row = row_bytes(call);
    const Words words = *u;
    const int fma = multiply_by == ONES;
    __m512i table[8], out[2];
    if (call->meaning == LEVEL) memcpy(table, u->levels, sizeof u->levels);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        if (call->meaning == LARGE && (r == 0 || (row + r) % part->tile_rows == 0))
            wide_table(part, (row + r) / part->tile_rows, call->bits, table);
        int64_t column = from, to = 0;
        for (; column + WIDE <= end; column += WIDE, p += 8 * words.bits, to += WIDE) {
            decode_wide(vectors, &words, p, WIDE, table, out);
            for (int k = 0; k < 2; k++) put_weights(fma, w, r, to + 32 * k, out[k]);
        }
        if (column == end) continue;
        decode_wide(vectors, &words, p, end - column, table, out);
        for (int k = 0; k < 2; k++) put_weights(fma, w, r, to + 32 * k, out[k]);
    }
}

typedef void DecodeRows(
    const Call *, const Part *, const Words *, int64_t row, int count, int64_t from, int64_t end, Decoded *w
);
#define DECODE_ROWS(name, kind)                                                                                              \
    NOINLINE name##_##kind(                                                                                                  \
        const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end, Decoded *w    \
    ) {                                                                                                                      \
        name(kind, call, part, u, row, count, from, end, w);                                                                 \
    }
DECODE_ROWS(decode_small, TILES) DECODE_ROWS(decode_small, WHOLE) DECODE_ROWS(decode_small, HALVES)
DECODE_ROWS(decode_large, 0) DECODE_ROWS(decode_large, 1) DECODE_ROWS(decode_large, 2) DECODE_ROWS(decode_large, 4)
DECODE_ROWS(decode_large, 8)
static DecodeRows *const DECODE_SMALL[] = {decode_small_TILES, decode_small_WHOLE, decode_small_HALVES};
static DecodeRows *const DECODE_LARGE[] = {
    decode_large_0, decode_large_1, decode_large_2, decode_large_4, decode_large_8
};

/* sums[r] += row r of the buffer times a panel, 16 tokens of which are its lanes; `pairs` of columns. Fetches what will be
 * decoded next, `step` bytes a pair from `next` on. */
typedef void AddPanel(const Decoded *w, const uint16_t *x, int64_t pairs, const uint8_t *next, int64_t step, vf sums[UNIT]);

NOINLINE add_pairs_of_panel(
    const Decoded *w, const uint16_t *x, int64_t pairs, const uint8_t *next, int64_t step, vf sums[UNIT]
) {
    __m512 acc[UNIT];
    for (int r = 0; r < UNIT; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++, x += 32, next += step) {
        __builtin_prefetch(next, 0, 2);
        __m512i tokens = _mm512_load_si512(x);
        for (int r = 0; r < UNIT; r++) acc[r] = add_pairs(acc[r], pair_at(w->words[r] + 2 * i), tokens);
    }
    for (int r = 0; r < UNIT; r++) sums[r] += (vf)acc[r];
}

/* The same to the bit: a product of pairs is two FMAs, the odd one first, that take denormal numbers for zero. */
NOINLINE add_ones_of_panel(
    const Decoded *w, const uint16_t *x, int64_t pairs, const uint8_t *next, int64_t step, vf sums[UNIT]
) {
    __m512 acc[UNIT];
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    for (int r = 0; r < UNIT; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t v = 0; v < pairs / LANES; v++)
        for (const float *at = w->floats[0] + 32 * v, *end = at + LANES; at < end; at++, x += 32, next += step) {
            __builtin_prefetch(next, 0, 2);
            __m512i tokens = _mm512_load_si512(x);
            __m512 odd = (__m512)_mm512_and_si512(tokens, _mm512_set1_epi32((int)0xffff0000));
            __m512 even = (__m512)_mm512_slli_epi32(tokens, 16);
            for (int r = 0; r < UNIT; r++) acc[r] = _mm512_fmadd_ps(odd, _mm512_set1_ps(at[r * PANEL_ROW]), acc[r]);
            for (int r = 0; r < UNIT; r++) acc[r] = _mm512_fmadd_ps(even, _mm512_set1_ps(at[r * PANEL_ROW + LANES]), acc[r]);
        }
    for (int r = 0; r < UNIT; r++) sums[r] += (vf)acc[r];
    _mm_setcsr(before);
}

#ifdef __AMX_BF16__
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Whether the processor has tiles of bfloat16 and the system lets this process use them. */
static int may_use_amx(void) {
#ifdef EDKM_EMULATED_AMX
    return 1;
#else
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (1u << 22 | 1u << 24))) return 0;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
#endif
}

static void begin_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = UNIT, config.row_bytes[t] = 64;
    _tile_loadconfig(&config);
}

#define ADD_TILE(p)                                               \
    if (p < panels) {                                             \
        _tile_loadd(7, x + p * panel + v * LANES * 32, 64);       \
        _tile_dpbf16ps(p, 6, 7);                                  \
    }
/* sums[p][r] += row r of the buffer times panel p, of at most AMX_PANELS panels that are `panel` words apart. */
NOINLINE add_tiles(const Decoded *w, const uint16_t *x, int64_t pairs, int64_t panel, int64_t panels, vf sums[][UNIT]) {
    _tile_loadd(0, sums[0], 64);
    if (panels > 1) _tile_loadd(1, sums[1], 64);
    if (panels > 2) _tile_loadd(2, sums[2], 64);
    if (panels > 3) _tile_loadd(3, sums[3], 64);
    for (int64_t v = 0; v < pairs / LANES; v++) {
        _tile_loadd(6, w->words[0] + 32 * v, sizeof w->words[0]);
        ADD_TILE(0) ADD_TILE(1) ADD_TILE(2) ADD_TILE(3)
    }
    _tile_stored(0, sums[0], 64);
    if (panels > 1) _tile_stored(1, sums[1], 64);
    if (panels > 2) _tile_stored(2, sums[2], 64);
    if (panels > 3) _tile_stored(3, sums[3], 64);
}
#endif

/* Measured once, in less than a tenth of a millisecond; EDKM_MULTIPLY=pairs or ones says it instead. AMX is not measured: it is taken. */
static void choose_multiply(void) {
    const char *given = getenv("EDKM_MULTIPLY");
    if (multiply_by) return;
    if (given && (!strcmp(given, "pairs") || !strcmp(given, "ones"))) {
        multiply_by = *given == 'p' ? PAIRS : ONES;
        return;
    }
#ifdef __AMX_BF16__
    if (may_use_amx()) {
        multiply_by = AMX;
        return;
    }
#endif
    Decoded w __attribute__((aligned(64)));
    uint16_t x[PANEL_DEPTH * LANES] __attribute__((aligned(64)));
    vf sums[UNIT] = {};
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    memset(&w, 0, sizeof w), memset(x, 0, sizeof x);
    for (int turn = 0; turn < 16; turn++) {
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        (turn % 2 ? add_ones_of_panel : add_pairs_of_panel)(&w, x, PANEL_DEPTH / 2, (const uint8_t *)x, 0, sums);
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t took = (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
        if (took < best[turn % 2]) best[turn % 2] = took;
    }
    multiply_by = best[1] < best[0] ? ONES : PAIRS;
}

/* Rows [row, row + count) of W, at most UNIT, with all tokens. */
static void panels_of_unit(const Call *call, const Part *part, const Words *u, int64_t row, int count) {
    Decoded w __attribute__((aligned(64)));
    AddPanel *add_panel = multiply_by == ONES ? add_ones_of_panel : add_pairs_of_panel;
    vf sums[SHARED_PANELS][UNIT];
    int64_t parts = (call->columns + PANEL_DEPTH - 1) / PANEL_DEPTH, depth = (call->columns + parts - 1) / parts;
    DecodeRows *decode = call->meaning == SMALL ? DECODE_SMALL[tiles_of(call, part)] : DECODE_LARGE[kind_of_wide(call)];
    const uint8_t *next = part->indices + (row + count) * row_bytes(call);
    depth = (depth + RUN - 1) / RUN * RUN;
    if (count < UNIT) memset(&w, 0, sizeof w);
    prefetch_tables(call, part, row, count);
#ifdef __AMX_BF16__
    if (multiply_by == AMX) begin_tiles();
#endif
    for (int64_t token = 0; token < call->tokens; token += SHARED_PANELS * LANES) {
        int64_t panels = smaller(SHARED_PANELS, (call->tokens - token + LANES - 1) / LANES);
        memset(sums, 0, panels * sizeof sums[0]);
        for (int64_t from = 0; from < call->columns; from += depth) {
            int64_t end = smaller(from + depth, call->columns), pairs = vectors_of(call, end - from) * LANES;
            decode(call, part, u, row, count, from, end, &w);
            const uint16_t *x = (const uint16_t *)call->x + token * call->x_stride + from * LANES;
            int64_t first = 0;
#ifdef __AMX_BF16__
            for (; multiply_by == AMX && first < panels; first += AMX_PANELS)
                add_tiles(
                    &w, x + first * LANES * call->x_stride, pairs, LANES * call->x_stride,
                    smaller(AMX_PANELS, panels - first), sums + first
                );
#endif
            for (int64_t p = first; p < panels; p++, x += LANES * call->x_stride)
                add_panel(&w, x, pairs, next + (p ? 0 : UNIT * from * call->bits / 8), p ? 0 : UNIT / 4 * call->bits, sums[p]);
        }
        for (int64_t p = 0; p < panels; p++) {
            transpose(sums[p]);
            for (int64_t n = 0, at = token + p * LANES; n < smaller(LANES, call->tokens - at); n++)
                finish(call, part, row, count, at + n, sums[p][n]);
        }
    }
#ifdef __AMX_BF16__
    if (multiply_by == AMX) _tile_release();
#endif
}

/* Panels of x, for each pair of columns those of 16 tokens, pairs in the order in which they are decoded. Rows are first
 * laid out behind the panels. */
static void lay_out_panels(const Call *call, const uint16_t *x, int64_t x_row, const __m512i order[5], uint16_t *to) {
    int64_t stride = call->x_stride, vectors = vectors_of(call, call->columns);
    uint16_t *rows = to + (call->tokens + LANES - 1) / LANES * LANES * stride;
    for (int64_t token = 0; token < call->tokens; token += LANES, to += LANES * stride) {
        for (int64_t n = 0; n < LANES; n++) {
            const uint16_t *own = x + (token + n) * x_row;
            if (token + n >= call->tokens) memset(rows + n * stride, 0, stride * sizeof *rows);
            else if (call->meaning == SMALL) lay_out_row(own, call->columns, order, RUN, rows + n * stride);
            else lay_out_wide(own, call->columns, WIDE, rows + n * stride);
        }
        for (int64_t v = 0; v < vectors; v++) {
            vf block[LANES];
            for (int n = 0; n < LANES; n++) block[n] = (vf)_mm512_load_si512(rows + n * stride + 32 * v);
            transpose(block);
            memcpy(to + v * LANES * 32, block, sizeof block);
        }
    }
}
