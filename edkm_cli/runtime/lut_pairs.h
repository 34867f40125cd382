/* The same product for bfloat16 activations, where the processor multiplies pairs of bfloat16 and adds them in float32
 * (AVX-512 BF16): tables are rounded to bfloat16, as the dense weight would be, and 32 entries are looked up by one permute of
 * words. Included by lut_linear.c.
 *
 * Blocks of 128 columns are decoded in an order of their own (lut_blocks.h), in which the activations are laid out once a
 * call: vector k of a block holds columns 4j + k. Here: up to eight tokens and codes of up to four bits; wider codes and
 * levels: lut_wide.h; more tokens: lut_panels.h.
 */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_PAIRS 1

#define RUNS_DEPTH 1024 /* columns after which sums of several tokens start anew: 16 KiB of x, which stay in the L1 cache */
#define FEW_TOKENS 8    /* that share a decoding in registers; in float16 twice as many */
#define MOST_WAYS 4
#define SHORT_ROW 512   /* bytes of indices in a row of one table */

#include "lut_blocks.h"

#ifdef __AVX512FP16__
#define HAS_HALVES 1
#else
#define HAS_HALVES 0
#endif
#define MOST_HALVES 16 /* products in a sum of float16, before it goes to float32 */

/* How pairs are multiplied: by the processor's products of pairs, or one after the other by float32 FMA, which some processors
 * do four times as often. Both give the same bits, so that it is measured: `choose_multiply`. AMX, where it is, multiplies
 * tiles of 16 rows, 32 columns and 16 tokens, in sums of another order. */
enum { UNKNOWN, PAIRS, ONES, AMX };
static int multiply_by;

INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* sum + a b: pairs of bfloat16 in 16 sums of float32 or, with `half`, 32 products and sums of float16. */
INLINE __m512 add_products(int half, __m512 sum, __m512i a, __m512i b) {
#if HAS_HALVES
    if (half) return (__m512)_mm512_fmadd_ph((__m512h)a, (__m512h)b, (__m512h)sum);
#endif
    (void)half;
    return add_pairs(sum, a, b);
}

/* acc[n] += a block of weights times token n; what is left of a row has its lanes of zeros, as x has. */
INLINE void add_run(
    int half, int codes, int tokens, int ways, const __m512i w[], const uint16_t *x, __m512 acc[][MOST_WAYS]
) {
    for (int k = 0; k < codes; k++)
        for (int n = 0; n < tokens; n++)
            acc[n][k % ways] = add_products(half, acc[n][k % ways], w[k], _mm512_load_si512(x + n * RUN + 32 * k));
}

INLINE __m512 both_halves(__m512 sum) {
    __m512i words = (__m512i)sum;
    return _mm512_add_ps(
        _mm512_cvtph_ps(_mm512_castsi512_si256(words)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))
    );
}

INLINE __m512 add_sums(int half, __m512 a, __m512 b) {
#if HAS_HALVES
    if (half) return (__m512)_mm512_add_ph((__m512h)a, (__m512h)b);
#endif
    (void)half;
    return _mm512_add_ps(a, b);
}

/* Adds the sums of one token to `total` in float32, and begins them anew. */
INLINE void flush(int half, int ways, __m512 acc[], vf *total) {
    __m512 sum = acc[0];
    if (ways > 1) sum = add_sums(half, sum, acc[1]);
    if (ways > 2) sum = add_sums(half, sum, add_sums(half, acc[2], acc[3]));
    *total += (vf)(half ? both_halves(sum) : sum);
    for (int v = 0; v < ways; v++) acc[v] = _mm512_setzero_ps();
}

/* sums[n][i]: lane-wise sums of columns [from, end) of row `row + i` of W times token n, added to what is there. HALVES
 * prepares the tables of a row of tiles once, so that there are at most RUNS_DEPTH columns. */
INLINE void few_pairs(
    int half, int tiles, int tokens, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from,
    int64_t end, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t step = RUN * call->bits / 8, in_row = row_bytes(call), tile_rows = part->tile_rows;
    int64_t ahead = end - from == call->columns ? AHEAD : in_row; /* a part of a row: the same part of the next one */
    const int ways = tokens > 8 ? 1 : tokens == 8 ? 2 : 4; /* sums of a token, so that additions overlap */
    __m512i tables[RUNS_DEPTH / RUN];
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[2 * FEW_TOKENS][MOST_WAYS];
        __m512i w[4], table = _mm512_setzero_si512();
        int64_t column = from, block = 0;
        for (int n = 0; n < tokens; n++) {
            if (!from) sums[n][r] = splat(0);
            for (int v = 0; v < ways; v++) acc[n][v] = _mm512_setzero_ps();
        }
        if (tiles == HALVES && (r == 0 || (row + r) % tile_rows == 0)) tables_of_row(call, part, row + r, from, end, tables);
        if (tiles == WHOLE) {
            int64_t group = tile_rows == 1 ? row + r : (row + r) / tile_rows;
            table = word_table(part->lut, part->lut_dtype, group, call->bits);
        }
        for (; column + RUN <= end; column += RUN, p += step, at += RUN * tokens) {
            __builtin_prefetch(p + ahead);
            decode_block(tiles, u, call, part, row + r, column, RUN, p, tiles == HALVES ? tables[block] : table, w);
            add_run(half, 4, tokens, ways, w, at, acc);
            if (++block % (MOST_HALVES * ways / 4) == 0 && half)
                for (int n = 0; n < tokens; n++) flush(half, ways, acc[n], &sums[n][r]);
        }
        if (tiles == HALVES && end > column) table = tables[block];
        if (end - column > RUN / 2) {
            decode_block(tiles, u, call, part, row + r, column, end - column, p, table, w);
            add_run(half, 4, tokens, ways, w, at, acc);
        } else if (end > column) {
            decode_block(tiles, u, call, part, row + r, column, end - column, p, table, w);
            add_run(half, 2, tokens, ways, w, at, acc);
        }
        for (int n = 0; n < tokens; n++) flush(half, ways, acc[n], &sums[n][r]);
    }
}

/* A block of two rows of W times one token: what is loaded of x serves both. */
INLINE void add_two_rows(
    int half, int tiles, const Words *u, int codes, const uint8_t *const p[2], int64_t left, const __m512i table[2], const uint16_t *x,
    __m512 acc[2][MOST_WAYS]
) {
    for (int i = 0; i < 2; i++) {
        __m512i w[4];
        if (tiles == HALVES && left >= RUN) decode_halves(u, p[i], table[i], w);
        else decode_run(u, codes, p[i], left, table[i], w);
        add_run(half, codes, 1, MOST_WAYS, w, x, &acc[i]);
    }
}

/* The same as `few_pairs` for one token and short rows, of one table each or, with HALVES, of tiles an even number of rows
 * high. What is done once a row counts here: two rows at a time, in sums of the same order, their tables prepared together.
 * Long rows from memory come faster one by one. */
INLINE void short_rows(
    int half, int tiles, const Call *call, const Part *part, const Words *u, int64_t row, int count, const uint16_t *x, vf sums[]
) {
    RowTables of_rows;
    __m512i of_blocks[SHORT_BLOCKS];
    int64_t step = RUN * u->bits / 8, in_row = row_bytes(call);
    int64_t ahead = (AHEAD + 2 * in_row - 1) / (2 * in_row) * (2 * in_row); /* the same place of a later pair of rows */
    const Words words = *u;
    if (tiles == WHOLE) prepare_tables(&of_rows, part, u->bits, row, count);
    for (int r = 0; r < count; r += 2) {
        const uint8_t *p[2];
        __m512i table[2], *block = of_blocks;
        __m512 acc[2][MOST_WAYS];
        const uint16_t *at = x;
        int64_t left = call->columns;
        if (tiles == HALVES && (r == 0 || (row + r) % part->tile_rows == 0))
            tables_of_row(call, part, row + r, 0, call->columns, of_blocks);
        for (int i = 0; i < 2; i++) { /* an odd last row twice */
            p[i] = part->indices + (row + r + (r + i < count ? i : 0)) * in_row;
            if (tiles == WHOLE) table[i] = next_table(&of_rows, r + i + 1 >= count);
            for (int v = 0; v < MOST_WAYS; v++) acc[i][v] = _mm512_setzero_ps();
            sums[r + i] = splat(0);
        }
        for (int n = 1; left >= RUN; left -= RUN, at += RUN, n++) {
            if (tiles == HALVES) table[0] = table[1] = *block++;
            add_two_rows(half, tiles, &words, 4, p, RUN, table, at, acc);
            for (int i = 0; i < 2; i++) {
                p[i] += step, __builtin_prefetch(p[i] + ahead);
                if (half && n % MOST_HALVES == 0) flush(half, MOST_WAYS, acc[i], &sums[r + i]);
            }
        }
        if (tiles == HALVES && left) table[0] = table[1] = *block;
        if (left > RUN / 2) add_two_rows(half, tiles, &words, 4, p, left, table, at, acc);
        else if (left) add_two_rows(half, tiles, &words, 2, p, left, table, at, acc);
        for (int i = 0; i < 2; i++) flush(half, MOST_WAYS, acc[i], &sums[r + i]);
    }
}

typedef void ShortRows(const Call *, const Part *, const Words *, int64_t row, int count, const uint16_t *x, vf sums[]);
#define SHORT_ROWS(half, tiles)                                                                                        \
    NOINLINE short_rows_##half##_##tiles(                                                                              \
        const Call *call, const Part *part, const Words *u, int64_t row, int count, const uint16_t *x, vf sums[]       \
    ) {                                                                                                                \
        short_rows(half, tiles, call, part, u, row, count, x, sums);                                                   \
    }
SHORT_ROWS(0, WHOLE) SHORT_ROWS(0, HALVES)

/* A function of its own for each number of tokens, so that accumulators get all registers. */
typedef void FewPairs(
    const Call *, const Part *, const Words *, int64_t row, int count, int64_t from, int64_t end, const uint16_t *x,
    vf sums[][UNIT]
);
/* `name` for each number of tokens, and these functions in their order; `half` and `kind` are its first arguments. */
#define PAIRS_OF(name, half, kind, tokens)                                                                               \
    NOINLINE name##_##half##_##kind##_##tokens(                                                                          \
        const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end,           \
        const uint16_t *x, vf sums[][UNIT]                                                                               \
    ) {                                                                                                                  \
        name(half, kind, tokens, call, part, u, row, count, from, end, x, sums);                                         \
    }
#define ALL_TOKENS(name, half, kind)                                                                                    \
    PAIRS_OF(name, half, kind, 1) PAIRS_OF(name, half, kind, 2) PAIRS_OF(name, half, kind, 4) PAIRS_OF(name, half, kind, 8)
#define NAMES_BY_TOKENS(name, half, kind) \
    name##_##half##_##kind##_1, name##_##half##_##kind##_2, name##_##half##_##kind##_4, name##_##half##_##kind##_8
#define HALVES_BY_TOKENS(kind) {NAMES_BY_TOKENS(few_pairs, 1, kind), few_pairs_1_##kind##_16}
ALL_TOKENS(few_pairs, 0, TILES) ALL_TOKENS(few_pairs, 0, WHOLE) ALL_TOKENS(few_pairs, 0, HALVES)
#if HAS_HALVES
SHORT_ROWS(1, WHOLE) SHORT_ROWS(1, HALVES)
ALL_TOKENS(few_pairs, 1, TILES) ALL_TOKENS(few_pairs, 1, WHOLE) ALL_TOKENS(few_pairs, 1, HALVES)
PAIRS_OF(few_pairs, 1, TILES, 16) PAIRS_OF(few_pairs, 1, WHOLE, 16) PAIRS_OF(few_pairs, 1, HALVES, 16)
#endif
static ShortRows *const SHORT[][2] = {
    {short_rows_0_WHOLE, short_rows_0_HALVES},
#if HAS_HALVES
    {short_rows_1_WHOLE, short_rows_1_HALVES},
#endif
};
static FewPairs *const FEW_PAIRS[][3][5] = {
    {{NAMES_BY_TOKENS(few_pairs, 0, TILES)}, {NAMES_BY_TOKENS(few_pairs, 0, WHOLE)}, {NAMES_BY_TOKENS(few_pairs, 0, HALVES)}},
#if HAS_HALVES
    {HALVES_BY_TOKENS(TILES), HALVES_BY_TOKENS(WHOLE), HALVES_BY_TOKENS(HALVES)},
#endif
};

#include "lut_wide.h"

/* The power of two of tokens that the functions above take at once: at least as many as there are. */
INLINE int size_of(int64_t tokens) {
    int size = 0;
    while (1 << size < tokens) size++;
    return size;
}

INLINE int tiles_of(const Call *call, const Part *part) {
    return part->tile_columns == call->columns ? WHOLE : part->tile_columns % (RUN / 2) ? TILES : HALVES;
}

/* Fetch the tables of the rows after [row, row + count): a row has its own and would wait for it. */
INLINE void prefetch_tables(const Call *call, const Part *part, int64_t row, int64_t count) {
    int64_t size = part->lut_dtype == FLOAT32 ? 4 : part->lut_dtype == FLOAT8_E4M3 ? 1 : 2, first = row + count;
    if (call->meaning >= LEVEL || first >= part->rows) return;
    int64_t last = smaller(first + UNIT, part->rows) - 1, end = group_at(call, part, last, call->columns - 1) + 1;
    for (int64_t at = (group_at(call, part, first, 0) << call->bits) * size; at < (end << call->bits) * size; at += 64)
        __builtin_prefetch((const char *)part->lut + at);
}

/* Whether all tokens share a decoding in registers. */
INLINE int is_few(const Call *call) { return call->tokens <= (call->half ? 2 * FEW_TOKENS : FEW_TOKENS); }

/* Rows [row, row + count) of W, at most UNIT, with all tokens of a call that `is_few`. */
static void pairs_of_unit(const Call *call, const Part *part, const Words *u, int64_t row, int count) {
    vf sums[2 * FEW_TOKENS][UNIT];
    int tiles = tiles_of(call, part), small = call->meaning == SMALL, size = size_of(call->tokens);
    int64_t depth = size < 3 && tiles == WHOLE ? call->columns : RUNS_DEPTH;
    int even = part->tile_rows % 2 == 0 && call->columns <= SHORT_BLOCKS * RUN;
    int short_row = tiles == WHOLE ? row_bytes(call) <= SHORT_ROW : even;
    int two = call->tokens == 1 && small && tiles != TILES && short_row;
    prefetch_tables(call, part, row, count);
    if (two) SHORT[call->half][tiles == HALVES](call, part, u, row, count, call->x, sums[0]);
    for (int64_t from = 0; !two && from < call->columns; from += depth)
        (small ? FEW_PAIRS[call->half][tiles] : FEW_WIDE[kind_of_wide(call)])
            [size](call, part, u, row, count, from, smaller(from + depth, call->columns), call->x, sums);
    for (int n = 0; n < call->tokens; n++) {
        for (int i = count; i < UNIT; i++) sums[n][i] = splat(0);
        finish(call, part, row, count, n, call->half ? sum_lanes(sums[n]) * splat(call->unscale[n]) : sum_lanes(sums[n]));
    }
}

/* The greatest of `count` words below their signs: the greatest magnitude of numbers of 16 bits. */
INLINE int greatest_word(const void *words, int64_t count) {
    __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < count; i += 32) {
        __m512i part = _mm512_maskz_loadu_epi16(first_words(count - i), (const uint16_t *)words + i);
        most = _mm512_max_epu16(most, _mm512_and_si512(part, magnitude));
    }
    uint16_t lanes[32];
    _mm512_storeu_si512(lanes, most);
    int found = 0;
    for (int i = 0; i < 32; i++) found = lanes[i] > found ? lanes[i] : found;
    return found;
}

/* Where the processor multiplies in float16, up to twice FEW_TOKENS tokens with tables of float16 are: entries are not rounded,
 * each token is scaled by a power of two, so that MOST_HALVES products neither overflow nor, beside the greatest ones, get
 * lost, and after so many sums go to float32. 0 where a number is not finite; else the exponents of the scales. */
static int takes_halves(const Call *call, const uint16_t *x, int64_t x_row, int exponents[2 * FEW_TOKENS]) {
    int greatest = 0;
    int64_t most_tokens = multiply_by == AMX ? FEW_TOKENS : 2 * FEW_TOKENS;
    if (!HAS_HALVES || call->meaning != SMALL || call->tokens > most_tokens || call->count > MOST_PARTS) return 0;
    for (int64_t p = 0; p < call->count; p++) {
        const Part *part = call->parts + p;
        if (part->lut_dtype != FLOAT16) return 0;
        int found = greatest_word(part->lut, (group_at(call, part, part->rows - 1, call->columns - 1) + 1) << call->bits);
        greatest = found > greatest ? found : greatest;
    }
    for (int64_t n = 0; n < call->tokens; n++) {
        int most = greatest_word(x + n * x_row, call->columns), of_x = (most >> 7) - 127, of_lut = (greatest >> 10) - 15;
        if (most >= 0x7f80 || greatest >= 0x7c00) return 0;
        int room = 7 - of_lut < 14 ? 7 - of_lut : 14; /* (2^6 products) 2^(of_lut + 1) 2^(of_x + scale + 1) <= 2^15 */
        exponents[n] = room - of_x < 120 ? room - of_x : 120;
    }
    return 1;
}

/* x times 2^exponent in float16. */
INLINE void to_halves(const uint16_t *x, int64_t columns, int exponent, uint16_t *to) {
    __m512 scale = _mm512_set1_ps(ldexpf(1, exponent));
    for (int64_t i = 0; i < columns; i += LANES) {
        __m256i words = _mm256_maskz_loadu_epi16((__mmask16)first_words(columns - i), x + i);
        __m512 values = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(_mm512_mul_ps(values, scale), 0));
    }
}

/* Whether this product goes by pairs: no tile may start inside a group of four columns, and wider codes need whole rows of
 * one table. Few tokens' products with levels of eight bits wait for memory, in float32 as well. */
static int takes_pairs(const Call *call) {
    if (call->out_dtype != BFLOAT16) return 0;
    if (call->meaning >= LEVEL) return call->meaning == LEVEL || call->tokens >= BYTE_TOKENS;
    for (int64_t p = 0; p < call->count; p++) {
        int64_t tile = call->parts[p].tile_columns;
        if (tile != call->columns && (call->meaning == LARGE || tile % 4)) return 0;
    }
    return 1;
}

/* One row of x as blocks are decoded, with zeros up to a whole one; blocks of a row are `apart` words apart. */
INLINE void lay_out_row(const uint16_t *x, int64_t columns, const __m512i order[5], int64_t apart, uint16_t *to) {
    for (int64_t k = 0; k < columns; k += RUN, to += apart) {
        __m512i in[4];
        int64_t left = columns - k;
        for (int v = 0; v < 4; v++) in[v] = _mm512_maskz_loadu_epi16(first_words(left - 32 * v), x + k + 32 * v);
        if (left <= RUN / 2) {
            __m512i odd = _mm512_add_epi16(order[4], _mm512_set1_epi16(1));
            _mm512_store_si512(to, _mm512_permutex2var_epi16(in[0], order[4], in[1]));
            _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(in[0], odd, in[1]));
            return;
        }
        for (int v = 0; v < 4; v++) {
            __m512i low = _mm512_permutex2var_epi16(in[0], order[v], in[1]);
            __m512i high = _mm512_permutex2var_epi16(in[2], order[v], in[3]);
            _mm512_store_si512(to + 32 * v, _mm512_mask_blend_epi16(0xffff0000u, low, high));
        }
    }
}

#include "lut_panels.h"

/* x as the loops read it: block by block that of each token, and zeros for those missing to a power of two. */
static void lay_out_pairs(const Call *call, const uint16_t *x, int64_t x_row, const int *exponents, uint16_t *to) {
    uint16_t numbers[5][32] __attribute__((aligned(64)));
    __m512i order[5];
    for (int j = 0; j < 32; j++) {
        for (int k = 0; k < 4; k++) numbers[k][j] = (uint16_t)((4 * j + k) % 64);
        numbers[4][j] = (uint16_t)(2 * j);
    }
    for (int k = 0; k < 5; k++) order[k] = _mm512_load_si512(numbers[k]);
    if (!is_few(call)) {
        lay_out_panels(call, x, x_row, order, to);
        return;
    }
    int64_t size = 1 << size_of(call->tokens), run = call->meaning == SMALL ? RUN : WIDE;
    for (int64_t n = 0; n < call->tokens; n++) {
        uint16_t *halves = to + LANES * call->x_stride;
        if (call->half) to_halves(x + n * x_row, call->columns, exponents[n], halves);
        if (call->meaning == SMALL)
            lay_out_row(call->half ? halves : x + n * x_row, call->columns, order, size * run, to + n * run);
        else lay_out_wide(x + n * x_row, call->columns, size * run, to + n * run);
    }
    for (int64_t k = 0; call->tokens < size && k < call->x_stride; k += run)
        memset(to + k * size + call->tokens * run, 0, (size_t)((size - call->tokens) * run) * sizeof *to);
}
#else
#define HAS_PAIRS 0
#endif
