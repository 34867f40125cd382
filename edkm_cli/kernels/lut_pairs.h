/* The same product for bfloat16 activations and tables of at most 16 entries, where the processor multiplies pairs of
 * bfloat16 and adds them in float32 (AVX-512 BF16): tables are rounded to bfloat16, as the dense weight would be, and 32
 * entries are looked up by one permute of words. Included by lut_linear.c.
 *
 * 128 columns at a time: byte shuffle, so that word j holds the codes of columns 4j to 4j + 3; four shifts, each of which
 * brings one of the four codes of every word to its low bits; four lookups. What is above a code's bits chooses a copy of
 * the table. The activations are laid out in the same order, once a call: vector k of a block holds columns 4j + k. What
 * is left at the end of a row, if at most 64 columns, goes by words of two codes. Wider codes: lut_wide.h.
 */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define HAS_PAIRS 1

#define RUN 128          /* columns of a block */
#define RUNS_DEPTH 1024  /* columns after which sums of many tokens start anew: 32 KiB of x, which stay in the L1 cache */
#define MOST_TOKENS 16   /* that share one decoding */
#define MOST_WAYS 4
#define SHORT_ROW 512 /* bytes of indices in a row */

/* Tiles that end inside a block; whole rows of one table; tiles of a multiple of 64 columns, so that half a block has one. */
enum { TILES, WHOLE, HALVES };

/* How blocks are decoded: a shuffle and shifts for words of four codes, the same for words of two, and for bytes of one. */
typedef struct {
    __m512i spread, shift[4], spread_two, shift_two[2], spread_one, shift_one;
    __mmask64 bytes, bytes_two; /* of a block, and of half of it */
    int bits;
} Words;

INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE __mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

INLINE void prepare_words(Words *words, int bits) {
    uint8_t spread[2][64] __attribute__((aligned(64)));
    uint16_t shift[6][32] __attribute__((aligned(64)));
    for (int j = 0; j < 32; j++)
        for (int two = 0; two < 2; two++) {
            int codes = two ? 2 : 4, bit = codes * bits * j;
            spread[two][2 * j] = (uint8_t)(bit / 8);
            spread[two][2 * j + 1] = (uint8_t)((bit / 8 + 1) & 63);
            for (int k = 0; k < codes; k++) shift[4 * two + k][j] = (uint16_t)(bit % 8 + bits * k);
        }
    words->spread = _mm512_load_si512(spread[0]);
    words->spread_two = _mm512_load_si512(spread[1]);
    uint8_t one[2][64] __attribute__((aligned(64)));
    for (int i = 0; i < 64; i++) { /* eight codes are `bits` bytes */
        one[0][i] = (uint8_t)((i / 8 * bits + i % 8) & 63);
        one[1][i] = (uint8_t)(i % 8 * bits);
    }
    words->spread_one = _mm512_load_si512(one[0]);
    words->shift_one = _mm512_load_si512(one[1]);
    for (int k = 0; k < 4; k++) words->shift[k] = _mm512_load_si512(shift[k]);
    for (int k = 0; k < 2; k++) words->shift_two[k] = _mm512_load_si512(shift[4 + k]);
    words->bits = bits;
    words->bytes = first_bytes(RUN * bits / 8);
    words->bytes_two = first_bytes(RUN / 2 * bits / 8);
}

/* Entries of a group as words, repeated until they fill 32 lanes. */
INLINE __m512i word_table(const void *lut, int64_t dtype, int64_t group, int bits) {
    if (dtype == FLOAT16 && bits == 3) {
        __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)lut + group));
        return _mm512_broadcast_i32x4((__m128i)_mm256_cvtneps_pbh(entries));
    }
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)small_table(lut, dtype, group, bits));
    return _mm512_broadcast_i64x4(half);
}

INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* Vector k of a block takes lanes whose column, 4j + k (2j + k with `codes` 2), lies in [first, last). */
INLINE __mmask32 lanes_of(int codes, int k, int64_t first, int64_t last) {
    return first_words((last - k + codes - 1) / codes) & ~first_words((first - k + codes - 1) / codes);
}

/* Weights of a block of 128 or, with `codes` 2, of 64 columns, of which `left` are there and lie in one tile. */
INLINE void decode_run(const Words *u, int codes, const uint8_t *p, int64_t left, __m512i table, __m512i w[]) {
    int64_t whole = 32 * codes;
    __mmask64 inside = left < whole ? first_bytes((left * u->bits + 7) / 8) : codes == 4 ? u->bytes : u->bytes_two;
    __m512i bytes = _mm512_maskz_loadu_epi8(inside, p);
    bytes = _mm512_permutexvar_epi8(codes == 4 ? u->spread : u->spread_two, bytes);
    for (int k = 0; k < codes; k++) {
        __m512i at = _mm512_srlv_epi16(bytes, codes == 4 ? u->shift[k] : u->shift_two[k]);
        if (left >= whole) w[k] = _mm512_permutexvar_epi16(at, table);
        else w[k] = _mm512_maskz_permutexvar_epi16(lanes_of(codes, k, 0, left), at, table);
    }
}

/* The same where a block may hold parts of several tiles, whose borders lie between groups of four columns. */
INLINE void decode_tiles(
    const Words *u, int codes, const Call *call, const Part *part, int64_t row, int64_t column, const uint8_t *p, __m512i w[]
) {
    int64_t end = smaller(column + 32 * codes, call->columns), tile = part->tile_columns;
    __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes(((end - column) * u->bits + 7) / 8), p);
    bytes = _mm512_permutexvar_epi8(codes == 4 ? u->spread : u->spread_two, bytes);
    for (int k = 0; k < codes; k++) w[k] = _mm512_setzero_si512();
    for (int64_t from = column; from < end;) {
        int64_t stop = smaller(end, (from / tile + 1) * tile);
        __m512i table = word_table(part->lut, part->lut_dtype, group_at(call, part, row, from), call->bits);
        for (int k = 0; k < codes; k++) {
            __m512i at = _mm512_srlv_epi16(bytes, codes == 4 ? u->shift[k] : u->shift_two[k]);
            __mmask32 lanes = lanes_of(codes, k, from - column, stop - column);
            w[k] = _mm512_mask_permutexvar_epi16(w[k], lanes, at, table);
        }
        from = stop;
    }
}

/* The tables of both halves of a block: 16 words each. */
INLINE __m512i two_tables(const Call *call, const Part *part, int64_t row, int64_t column) {
    vf first = small_table(part->lut, part->lut_dtype, group_at(call, part, row, column), call->bits);
    vf second = small_table(part->lut, part->lut_dtype, group_at(call, part, row, column + RUN / 2), call->bits);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

/* Weights of a whole block whose halves have a table each: bit 4 of a lane's number, the half, chooses it. */
INLINE void decode_halves(const Words *u, const uint8_t *p, __m512i table, __m512i w[]) {
    __m512i bytes = _mm512_permutexvar_epi8(u->spread, _mm512_maskz_loadu_epi8(u->bytes, p));
    __m512i upper = _mm512_maskz_set1_epi16(0xffff0000u, 16), code = _mm512_set1_epi16(15);
    for (int k = 0; k < 4; k++) {
        __m512i at = _mm512_ternarylogic_epi64(_mm512_srlv_epi16(bytes, u->shift[k]), code, upper, 0xea); /* a & b | c */
        w[k] = _mm512_permutexvar_epi16(at, table);
    }
}

/* acc[n] += a block of weights times token n; what is left of a row has its lanes of zeros, as x has. */
INLINE void add_run(int codes, int tokens, int ways, const __m512i w[], const uint16_t *x, __m512 acc[][MOST_WAYS]) {
    for (int k = 0; k < codes; k++)
        for (int n = 0; n < tokens; n++)
            acc[n][k % ways] = add_pairs(acc[n][k % ways], w[k], _mm512_load_si512(x + n * RUN + 32 * k));
}

/* A block of row `row`, or its first `left` columns; `table`: that of a row, or of the block's halves. */
INLINE void decode_block(
    int tiles, const Words *u, const Call *call, const Part *part, int64_t row, int64_t column, int64_t left, const uint8_t *p,
    __m512i table, __m512i w[]
) {
    int codes = left > RUN / 2 ? 4 : 2;
    if (tiles == TILES) decode_tiles(u, codes, call, part, row, column, p, w);
    else if (tiles == HALVES && left >= RUN) decode_halves(u, p, table, w);
    else if (codes == 4) decode_run(u, 4, p, left, table, w);
    else decode_run(u, 2, p, left, table, w);
}

/* sums[n][i]: lane-wise sums of columns [from, end) of row `row + i` of W times token n, added to what is there. HALVES
 * prepares the tables of a row of tiles once, so that there are at most RUNS_DEPTH columns. */
INLINE void few_pairs(
    int tiles, int tokens, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from,
    int64_t end, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t step = RUN * call->bits / 8, in_row = row_bytes(call), tile_rows = part->tile_rows;
    int64_t ahead = end - from == call->columns ? AHEAD : in_row; /* a part of a row: the same part of the next one */
    const int ways = tokens >= 16 ? 1 : tokens >= 8 ? 2 : 4; /* sums of a token, so that additions overlap */
    __m512i tables[RUNS_DEPTH / RUN];
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[MOST_TOKENS][MOST_WAYS];
        __m512i w[4], table = _mm512_setzero_si512();
        int64_t column = from, block = 0;
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < ways; v++) acc[n][v] = _mm512_setzero_ps();
        if (tiles == HALVES && (r == 0 || (row + r) % tile_rows == 0))
            for (int64_t i = 0, at = from; at < end; i++, at += RUN)
                tables[i] = end - at >= RUN ? two_tables(call, part, row + r, at)
                                            : word_table(part->lut, part->lut_dtype, group_at(call, part, row + r, at), call->bits);
        if (tiles == WHOLE) {
            int64_t group = tile_rows == 1 ? row + r : (row + r) / tile_rows;
            table = word_table(part->lut, part->lut_dtype, group, call->bits);
        }
        for (; column + RUN <= end; column += RUN, p += step, at += RUN * tokens) {
            __builtin_prefetch(p + ahead);
            decode_block(tiles, u, call, part, row + r, column, RUN, p, tiles == HALVES ? tables[block++] : table, w);
            add_run(4, tokens, ways, w, at, acc);
        }
        if (tiles == HALVES && end > column) table = tables[block];
        if (end - column > RUN / 2) {
            decode_block(tiles, u, call, part, row + r, column, end - column, p, table, w);
            add_run(4, tokens, ways, w, at, acc);
        } else if (end > column) {
            decode_block(tiles, u, call, part, row + r, column, end - column, p, table, w);
            add_run(2, tokens, ways, w, at, acc);
        }
        for (int n = 0; n < tokens; n++) {
            __m512 sum = acc[n][0];
            if (ways == 2) sum = _mm512_add_ps(sum, acc[n][1]);
            if (ways == 4) sum = _mm512_add_ps(_mm512_add_ps(sum, acc[n][1]), _mm512_add_ps(acc[n][2], acc[n][3]));
            sums[n][r] = from ? sums[n][r] + (vf)sum : (vf)sum;
        }
    }
}

/* A block of two rows of W times one token: what is loaded of x serves both. */
INLINE void add_two_rows(
    const Words *u, int codes, const uint8_t *const p[2], int64_t left, const __m512i table[2], const uint16_t *x,
    __m512 acc[2][MOST_WAYS]
) {
    for (int i = 0; i < 2; i++) {
        __m512i w[4];
        decode_run(u, codes, p[i], left, table[i], w);
        add_run(codes, 1, MOST_WAYS, w, x, &acc[i]);
    }
}

/* The tables of `groups` groups as words, each a number of entries apart that is returned. */
INLINE int word_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    if (part->lut_dtype != FLOAT16 || bits < 3) {
        for (int64_t i = 0; i < groups; i++)
            _mm512_mask_storeu_epi16(to + 16 * i, 0xffff, word_table(part->lut, part->lut_dtype, group + i, bits));
        return 16;
    }
    const uint16_t *from = (const uint16_t *)part->lut + (group << bits);
    for (int64_t i = 0; i < groups << bits; i += LANES) { /* two tables of eight at once */
        __m256i half = _mm256_maskz_loadu_epi16((__mmask16)first_words(smaller(LANES, (groups << bits) - i)), from + i);
        _mm256_store_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(half)));
    }
    return 1 << bits;
}

/* The same as `few_pairs` for one token and short rows of one table each, where what is done once a row counts: two rows at a
 * time, in sums of the same order, their tables prepared together. Long rows from memory come faster one by one. */
NOINLINE short_rows(
    const Call *call, const Part *part, const Words *u, int64_t row, int count, const uint16_t *x, vf sums[]
) {
    uint16_t tables[UNIT * 16] __attribute__((aligned(64)));
    int64_t step = RUN * u->bits / 8, in_row = row_bytes(call), tile_rows = part->tile_rows;
    int64_t group = row / tile_rows, used = row % tile_rows, last = (row + count - 1) / tile_rows;
    int64_t ahead = (AHEAD + 2 * in_row - 1) / (2 * in_row) * (2 * in_row); /* the same place of a later pair of rows */
    int apart = word_tables(part, group, last - group + 1, u->bits, tables);
    const uint16_t *entries = tables;
    const Words words = *u;
    for (int r = 0; r < count; r += 2) {
        const uint8_t *p[2];
        __m512i table[2];
        __m512 acc[2][MOST_WAYS];
        const uint16_t *at = x;
        int64_t left = call->columns;
        for (int i = 0; i < 2; i++) { /* an odd last row twice */
            p[i] = part->indices + (row + r + (r + i < count ? i : 0)) * in_row;
            if (apart == 8) table[i] = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)entries));
            else table[i] = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)entries));
            if (r + i + 1 < count && ++used == tile_rows) entries += apart, used = 0;
            for (int v = 0; v < MOST_WAYS; v++) acc[i][v] = _mm512_setzero_ps();
        }
        for (; left >= RUN; left -= RUN, at += RUN) {
            add_two_rows(&words, 4, p, RUN, table, at, acc);
            for (int i = 0; i < 2; i++) p[i] += step, __builtin_prefetch(p[i] + ahead);
        }
        if (left > RUN / 2) add_two_rows(&words, 4, p, left, table, at, acc);
        else if (left) add_two_rows(&words, 2, p, left, table, at, acc);
        for (int i = 0; i < 2; i++)
            sums[r + i] = (vf)_mm512_add_ps(_mm512_add_ps(acc[i][0], acc[i][1]), _mm512_add_ps(acc[i][2], acc[i][3]));
    }
}

/* A function of its own for each number of tokens, so that accumulators get all registers. */
typedef void FewPairs(
    const Call *, const Part *, const Words *, int64_t row, int count, int64_t from, int64_t end, const uint16_t *x,
    vf sums[][UNIT]
);
/* `name` for each number of tokens, and these functions in their order; `kind` is its first argument. */
#define FEW_OF(name, kind, tokens)                                                                                       \
    NOINLINE name##_##kind##_##tokens(                                                                                   \
        const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from, int64_t end,           \
        const uint16_t *x, vf sums[][UNIT]                                                                               \
    ) {                                                                                                                  \
        name(kind, tokens, call, part, u, row, count, from, end, x, sums);                                               \
    }
#define ALL_TOKENS(name, kind) \
    FEW_OF(name, kind, 1) FEW_OF(name, kind, 2) FEW_OF(name, kind, 4) FEW_OF(name, kind, 8) FEW_OF(name, kind, 16)
#define NAMES_BY_TOKENS(name, kind) \
    {name##_##kind##_1, name##_##kind##_2, name##_##kind##_4, name##_##kind##_8, name##_##kind##_16}
ALL_TOKENS(few_pairs, TILES) ALL_TOKENS(few_pairs, WHOLE) ALL_TOKENS(few_pairs, HALVES)
static FewPairs *const FEW_PAIRS[3][5] = {
    NAMES_BY_TOKENS(few_pairs, TILES), NAMES_BY_TOKENS(few_pairs, WHOLE), NAMES_BY_TOKENS(few_pairs, HALVES)
};

#include "lut_wide.h"

/* How many tokens the functions above take at once where `left` are left: 1, 2, 4, 8 or 16, as a power of two. */
INLINE int size_of(int64_t left) {
    int size = 0;
    while (1 << size < left && 1 << size < MOST_TOKENS) size++;
    return size;
}

/* Rows [row, row + count) of W, at most UNIT, with all tokens: 16 of them at a time, the last ones 1, 2, 4, 8 or 16. */
static void pairs_of_unit(const Call *call, const Part *part, const Words *u, int64_t row, int count) {
    vf sums[MOST_TOKENS][UNIT];
    int whole = part->tile_columns == call->columns, wide = call->meaning - LARGE;
    int tiles = whole ? WHOLE : part->tile_columns % (RUN / 2) ? TILES : HALVES;
    for (int64_t token = 0; token < call->tokens; token += MOST_TOKENS) {
        int some = (int)smaller(call->tokens - token, MOST_TOKENS), size = size_of(some);
        const uint16_t *x = (const uint16_t *)call->x + token * call->x_stride;
        int64_t depth = size < 3 && whole ? call->columns : RUNS_DEPTH;
        int two = some == 1 && whole && wide < 0 && row_bytes(call) <= SHORT_ROW;
        if (two) short_rows(call, part, u, row, count, x, sums[0]);
        for (int64_t from = 0; !two && from < call->columns; from += depth)
            (wide < 0 ? FEW_PAIRS[tiles] : FEW_WIDE[wide])
                [size](call, part, u, row, count, from, smaller(from + depth, call->columns), x, sums);
        for (int n = 0; n < some; n++) {
            for (int i = count; i < UNIT; i++) sums[n][i] = splat(0);
            finish(call, part, row, count, token + n, sum_lanes(sums[n]));
        }
    }
}

/* Whether this product goes by pairs: no tile may start inside a group of four columns, and wider codes need whole rows of
 * one table. Few tokens' products with levels wait for memory, in float32 as well. */
static int takes_pairs(const Call *call) {
    if (call->out_dtype != BFLOAT16) return 0;
    if (call->meaning >= LEVEL) return call->tokens >= WIDE_TOKENS;
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

/* x as the loops read it: of each 16 tokens, or what is left of them rounded up, block by block. */
static void lay_out_pairs(const Call *call, const uint16_t *x, int64_t x_row, uint16_t *to) {
    uint16_t numbers[5][32] __attribute__((aligned(64)));
    __m512i order[5];
    for (int j = 0; j < 32; j++) {
        for (int k = 0; k < 4; k++) numbers[k][j] = (uint16_t)((4 * j + k) % 64);
        numbers[4][j] = (uint16_t)(2 * j);
    }
    for (int k = 0; k < 5; k++) order[k] = _mm512_load_si512(numbers[k]);
    for (int64_t token = 0; token < call->tokens; token += MOST_TOKENS, to += MOST_TOKENS * call->x_stride) {
        int64_t some = smaller(call->tokens - token, MOST_TOKENS), size = 1 << size_of(some);
        int64_t run = call->meaning == SMALL ? RUN : RUN / 2;
        for (int64_t n = 0; n < some; n++) {
            const uint16_t *own = x + (token + n) * x_row;
            if (call->meaning == SMALL) lay_out_row(own, call->columns, order, size * run, to + n * run);
            else lay_out_wide(own, call->columns, size * run, to + n * run);
        }
        for (int64_t k = 0; some < size && k < call->x_stride; k += run)
            memset(to + k * size + some * run, 0, (size_t)((size - some) * run) * sizeof *to);
    }
}
#else
#define HAS_PAIRS 0
#endif
