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
#define RUNS_DEPTH 1024  /* columns after which sums of several tokens start anew: 16 KiB of x, which stay in the L1 cache */
#define FEW_TOKENS 8     /* that share a decoding in registers; more: lut_panels.h */
#define MOST_WAYS 4
#define SHORT_ROW 512 /* bytes of indices in a row */

/* Tiles that end inside a block; whole rows of one table; tiles of a multiple of 64 columns, so that half a block has one. */
enum { TILES, WHOLE, HALVES };

/* How blocks are decoded: a shuffle and shifts for words of four codes, the same for words of two, and for bytes of one;
 * levels of up to seven bits as a table, repeated where they are fewer than 32. */
typedef struct {
    __m512i spread, shift[4], spread_two, shift_two[2], spread_one, shift_one, levels[4];
    __mmask64 bytes, bytes_two; /* of a block, and of half of it */
    int bits;
} Words;

INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE __mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

INLINE void prepare_levels(Words *words) {
    __m512 values[8];
    for (int v = 0; v < 8; v++) {
        __m512i code = _mm512_add_epi32(_mm512_set1_epi32(LANES * v), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        code = _mm512_and_si512(code, _mm512_set1_epi32((1 << words->bits) - 1));
        values[v] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(1 << (words->bits - 1))));
    }
    for (int v = 0; v < 4; v++) words->levels[v] = (__m512i)_mm512_cvtne2ps_pbh(values[2 * v + 1], values[2 * v]);
}

INLINE void prepare_words(Words *words, int bits, Meaning meaning) {
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
    if (meaning == LEVEL) prepare_levels(words);
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

/* The tables of a row of tiles: of the halves of each block from column `from` to `end`. */
INLINE void tables_of_row(const Call *call, const Part *part, int64_t row, int64_t from, int64_t end, __m512i tables[]) {
    for (int64_t i = 0, at = from; at < end; i++, at += RUN)
        tables[i] = end - at >= RUN ? two_tables(call, part, row, at)
                                    : word_table(part->lut, part->lut_dtype, group_at(call, part, row, at), call->bits);
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
    const int ways = tokens >= 8 ? 2 : 4; /* sums of a token, so that additions overlap */
    __m512i tables[RUNS_DEPTH / RUN];
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[FEW_TOKENS][MOST_WAYS];
        __m512i w[4], table = _mm512_setzero_si512();
        int64_t column = from, block = 0;
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < ways; v++) acc[n][v] = _mm512_setzero_ps();
        if (tiles == HALVES && (r == 0 || (row + r) % tile_rows == 0)) tables_of_row(call, part, row + r, from, end, tables);
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

/* 16 entries of a table as words, of which those in `inside` are there. */
INLINE __m256i sixteen_words(const void *lut, int64_t dtype, int64_t at, __mmask16 inside) {
    if (dtype == FLOAT32) return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, (const float *)lut + at));
    __m256i words = _mm256_maskz_loadu_epi16(inside, (const uint16_t *)lut + at);
    return dtype == BFLOAT16 ? words : (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(words));
}

/* The tables of `groups` groups as words, each a number of entries apart that is returned. */
INLINE int word_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    int64_t first = group << bits, last = (group + groups) << bits;
    for (int64_t i = 0; part->lut_dtype == FLOAT8_E4M3 && i < groups; i++)
        _mm512_mask_storeu_epi16(to + 16 * i, 0xffff, word_table(part->lut, part->lut_dtype, group + i, bits));
    if (part->lut_dtype == FLOAT8_E4M3) return 16;
    for (int64_t at = first; at < last; at += LANES, to += LANES)
        _mm256_store_si256((__m256i *)to, sixteen_words(part->lut, part->lut_dtype, at, (__mmask16)first_words(last - at)));
    return 1 << bits;
}

/* Tables of rows that follow one another, prepared together. */
typedef struct {
    uint16_t words[UNIT * 16] __attribute__((aligned(64)));
    int64_t tile_rows, used; /* rows of the current tile that are behind */
    const uint16_t *at;
    int apart;
} RowTables;

INLINE void prepare_tables(RowTables *tables, const Part *part, int bits, int64_t row, int count) {
    int64_t group = row / part->tile_rows;
    tables->tile_rows = part->tile_rows, tables->used = row % part->tile_rows, tables->at = tables->words;
    tables->apart = word_tables(part, group, (row + count - 1) / part->tile_rows - group + 1, bits, tables->words);
}

/* That of the next row; the last one may be asked for again. */
INLINE __m512i next_table(RowTables *tables, int last) {
    const uint16_t *at = tables->at;
    if (!last && ++tables->used == tables->tile_rows) tables->at += tables->apart, tables->used = 0;
    if (tables->apart == 8) return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)at));
    if (tables->apart == 16) return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)at));
    if (tables->apart == 4) return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)at));
    return _mm512_broadcastd_epi32(_mm_loadu_si32(at));
}

/* The same as `few_pairs` for one token and short rows of one table each, where what is done once a row counts: two rows at a
 * time, in sums of the same order, their tables prepared together. Long rows from memory come faster one by one. */
NOINLINE short_rows(
    const Call *call, const Part *part, const Words *u, int64_t row, int count, const uint16_t *x, vf sums[]
) {
    RowTables tables;
    int64_t step = RUN * u->bits / 8, in_row = row_bytes(call);
    int64_t ahead = (AHEAD + 2 * in_row - 1) / (2 * in_row) * (2 * in_row); /* the same place of a later pair of rows */
    const Words words = *u;
    prepare_tables(&tables, part, u->bits, row, count);
    for (int r = 0; r < count; r += 2) {
        const uint8_t *p[2];
        __m512i table[2];
        __m512 acc[2][MOST_WAYS];
        const uint16_t *at = x;
        int64_t left = call->columns;
        for (int i = 0; i < 2; i++) { /* an odd last row twice */
            p[i] = part->indices + (row + r + (r + i < count ? i : 0)) * in_row;
            table[i] = next_table(&tables, r + i + 1 >= count);
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
    FEW_OF(name, kind, 1) FEW_OF(name, kind, 2) FEW_OF(name, kind, 4) FEW_OF(name, kind, 8)
#define NAMES_BY_TOKENS(name, kind) {name##_##kind##_1, name##_##kind##_2, name##_##kind##_4, name##_##kind##_8}
ALL_TOKENS(few_pairs, TILES) ALL_TOKENS(few_pairs, WHOLE) ALL_TOKENS(few_pairs, HALVES)
static FewPairs *const FEW_PAIRS[3][4] = {
    NAMES_BY_TOKENS(few_pairs, TILES), NAMES_BY_TOKENS(few_pairs, WHOLE), NAMES_BY_TOKENS(few_pairs, HALVES)
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

/* Rows [row, row + count) of W, at most UNIT, with all tokens, at most FEW_TOKENS. */
static void pairs_of_unit(const Call *call, const Part *part, const Words *u, int64_t row, int count) {
    vf sums[FEW_TOKENS][UNIT];
    int tiles = tiles_of(call, part), small = call->meaning == SMALL, size = size_of(call->tokens);
    int64_t depth = size < 3 && tiles == WHOLE ? call->columns : RUNS_DEPTH;
    int two = call->tokens == 1 && tiles == WHOLE && small && row_bytes(call) <= SHORT_ROW;
    if (two) short_rows(call, part, u, row, count, call->x, sums[0]);
    for (int64_t from = 0; !two && from < call->columns; from += depth)
        (small ? FEW_PAIRS[tiles] : FEW_WIDE[kind_of_wide(call)])
            [size](call, part, u, row, count, from, smaller(from + depth, call->columns), call->x, sums);
    for (int n = 0; n < call->tokens; n++) {
        for (int i = count; i < UNIT; i++) sums[n][i] = splat(0);
        finish(call, part, row, count, n, sum_lanes(sums[n]));
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

#include "lut_panels.h"

/* x as the loops read it: block by block that of each token, and zeros for those missing to a power of two. */
static void lay_out_pairs(const Call *call, const uint16_t *x, int64_t x_row, uint16_t *to) {
    uint16_t numbers[5][32] __attribute__((aligned(64)));
    __m512i order[5];
    for (int j = 0; j < 32; j++) {
        for (int k = 0; k < 4; k++) numbers[k][j] = (uint16_t)((4 * j + k) % 64);
        numbers[4][j] = (uint16_t)(2 * j);
    }
    for (int k = 0; k < 5; k++) order[k] = _mm512_load_si512(numbers[k]);
    if (call->tokens > FEW_TOKENS) {
        lay_out_panels(call, x, x_row, order, to);
        return;
    }
    int64_t size = 1 << size_of(call->tokens), run = call->meaning == SMALL ? RUN : WIDE;
    for (int64_t n = 0; n < call->tokens; n++) {
        if (call->meaning == SMALL) lay_out_row(x + n * x_row, call->columns, order, size * run, to + n * run);
        else lay_out_wide(x + n * x_row, call->columns, size * run, to + n * run);
    }
    for (int64_t k = 0; call->tokens < size && k < call->x_stride; k += run)
        memset(to + k * size + call->tokens * run, 0, (size_t)((size - call->tokens) * run) * sizeof *to);
}
#else
#define HAS_PAIRS 0
#endif
