/* Products of bfloat16 pairs with more than FEW_TOKENS tokens. Included by lut_pairs.h.
 *
 * 16 rows of W are decoded into the L1 cache, up to 640 columns of them, and multiplied with panels of 16 tokens: a lane is a
 * token, a pair of weights is broadcast, and nothing has to be summed across lanes. Panels share the decoding. A product
 * loads its weights, so that two of them a cycle are the limit of processors with two loads a cycle. Rows of the buffer are
 * an odd number of cache lines apart: a power of two would put all of them into the same few sets of the cache.
 */
#define PANEL_DEPTH 640
#define PANEL_ROW (PANEL_DEPTH + 32) /* words */
#define SHARED_PANELS 16             /* that share a decoding */

typedef uint16_t Decoded[UNIT][PANEL_ROW];

/* Vectors of 32 weights that decoding `columns` columns gives. */
INLINE int64_t vectors_of(const Call *call, int64_t columns) {
    int64_t left = columns % RUN;
    if (call->meaning != SMALL) return (columns + WIDE - 1) / WIDE * 2;
    return columns / RUN * 4 + (left > RUN / 2 ? 4 : left ? 2 : 0);
}

/* Columns [from, end) of rows [row, row + count) of W, codes of at most four bits; `from` is a multiple of RUN. */
INLINE void decode_small(
    int tiles, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end, Decoded w
) {
    int64_t step = RUN * call->bits / 8, in_row = row_bytes(call);
    const Words words = *u;
    __m512i tables[PANEL_DEPTH / RUN], table = _mm512_setzero_si512();
    RowTables of_rows;
    if (tiles == WHOLE) prepare_tables(&of_rows, part, call->bits, row, count);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        if (tiles == HALVES && (r == 0 || (row + r) % part->tile_rows == 0))
            tables_of_row(call, part, row + r, from, end, tables);
        if (tiles == WHOLE) table = next_table(&of_rows, r + 1 == count);
        uint16_t *to = w[r];
        __m512i out[4], *block = tables;
        int64_t column = from;
        for (; column + RUN <= end; column += RUN, p += step, to += RUN) {
            decode_block(tiles, &words, call, part, row + r, column, RUN, p, tiles == HALVES ? *block++ : table, out);
            for (int k = 0; k < 4; k++) _mm512_store_si512(to + 32 * k, out[k]);
        }
        if (column == end) continue;
        decode_block(tiles, &words, call, part, row + r, column, end - column, p, tiles == HALVES ? *block : table, out);
        for (int k = 0; k < 4; k++)
            if (k < 2 || end - column > RUN / 2) _mm512_store_si512(to + 32 * k, out[k]);
    }
}

/* The same for wider codes and for levels. */
INLINE void decode_large(
    int vectors, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end,
    Decoded w
) {
    int64_t in_row = row_bytes(call);
    const Words words = *u;
    __m512i table[8], out[2];
    if (call->meaning == LEVEL) memcpy(table, u->levels, sizeof u->levels);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        if (call->meaning == LARGE && (r == 0 || (row + r) % part->tile_rows == 0))
            wide_table(part, (row + r) / part->tile_rows, call->bits, table);
        uint16_t *to = w[r];
        int64_t column = from;
        for (; column + WIDE <= end; column += WIDE, p += 8 * words.bits, to += WIDE) {
            decode_wide(vectors, &words, p, WIDE, table, out);
            for (int k = 0; k < 2; k++) _mm512_store_si512(to + 32 * k, out[k]);
        }
        if (column == end) continue;
        decode_wide(vectors, &words, p, end - column, table, out);
        for (int k = 0; k < 2; k++) _mm512_store_si512(to + 32 * k, out[k]);
    }
}

typedef void DecodeRows(
    const Call *, const Part *, const Words *, int64_t row, int count, int64_t from, int64_t end, Decoded w
);
#define DECODE_ROWS(name, kind)                                                                                              \
    NOINLINE name##_##kind(                                                                                                  \
        const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end, Decoded w     \
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
NOINLINE add_panel(Decoded w, const uint16_t *x, int64_t pairs, const uint8_t *next, int64_t step, vf sums[UNIT]) {
    __m512 acc[UNIT];
    for (int r = 0; r < UNIT; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < pairs; i++, x += 32, next += step) {
        __builtin_prefetch(next, 0, 2);
        __m512i tokens = _mm512_load_si512(x);
        for (int r = 0; r < UNIT; r++) acc[r] = add_pairs(acc[r], pair_at(w[r] + 2 * i), tokens);
    }
    for (int r = 0; r < UNIT; r++) sums[r] += (vf)acc[r];
}

/* Rows [row, row + count) of W, at most UNIT, with all tokens. */
static void panels_of_unit(const Call *call, const Part *part, const Words *u, int64_t row, int count) {
    Decoded w __attribute__((aligned(64)));
    vf sums[SHARED_PANELS][UNIT];
    int64_t parts = (call->columns + PANEL_DEPTH - 1) / PANEL_DEPTH, depth = (call->columns + parts - 1) / parts;
    DecodeRows *decode = call->meaning == SMALL ? DECODE_SMALL[tiles_of(call, part)] : DECODE_LARGE[kind_of_wide(call)];
    const uint8_t *next = part->indices + (row + count) * row_bytes(call);
    depth = (depth + RUN - 1) / RUN * RUN;
    if (count < UNIT) memset(w, 0, sizeof w);
    prefetch_tables(call, part, row, count);
    for (int64_t token = 0; token < call->tokens; token += SHARED_PANELS * LANES) {
        int64_t panels = smaller(SHARED_PANELS, (call->tokens - token + LANES - 1) / LANES);
        memset(sums, 0, panels * sizeof sums[0]);
        for (int64_t from = 0; from < call->columns; from += depth) {
            int64_t end = smaller(from + depth, call->columns), pairs = vectors_of(call, end - from) * LANES;
            decode(call, part, u, row, count, from, end, w);
            const uint16_t *x = (const uint16_t *)call->x + token * call->x_stride + from * LANES;
            for (int64_t p = 0; p < panels; p++, x += LANES * call->x_stride)
                add_panel(w, x, pairs, next + (p ? 0 : UNIT * from * call->bits / 8), p ? 0 : UNIT / 4 * call->bits, sums[p]);
        }
        for (int64_t p = 0; p < panels; p++) {
            transpose(sums[p]);
            for (int64_t n = 0, at = token + p * LANES; n < smaller(LANES, call->tokens - at); n++)
                finish(call, part, row, count, at + n, sums[p][n]);
        }
    }
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
