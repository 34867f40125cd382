/* The same product for bfloat16 activations, where the processor multiplies pairs of bfloat16 and adds them in float32
 * (AVX-512 BF16): tables are rounded to bfloat16, as the dense weight would be, and 32 entries are looked up by one permute of
 * words.
 *
 * Blocks of 128 columns are decoded in an order of their own (below), in which the activations are laid out once a
 * call: vector k of a block holds columns 4j + k. Here: up to eight tokens and codes of up to four bits; wider codes and
 * levels, and more tokens: further below.
 */
#include "lut_call.h"

#include <stdlib.h>
#include <time.h>
#ifdef __AMX_BF16__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if HAS_PAIRS

#define RUNS_DEPTH 1024 /* columns after which sums of several tokens start anew: 16 KiB of x, which stay in the L1 cache */
#define FEW_TOKENS 8    /* that share a decoding in registers; in float16 twice as many */
#define MOST_WAYS 4
#define SHORT_ROW 512   /* bytes of indices in a row of one table */

/* Blocks of packed weights as vectors of bfloat16, by lookups in tables of at most 16 entries.
 *
 * 128 columns at a time: byte shuffle, so that word j holds the codes of columns 4j to 4j + 3; four products, each of which
 * brings one of the four codes of every word to its low bits; four lookups. What is above a code's bits chooses a copy of
 * the table. What is left at the end of a row, if at most 64 columns, goes by words of two codes.
 */
#define RUN 128         /* columns of a block */
#define SHORT_BLOCKS 32 /* whose tables are prepared at once, where each half of a block has one */

/* Tiles that end inside a block; whole rows of one table; tiles of a multiple of 64 columns, so that half a block has one. */
enum { TILES, WHOLE, HALVES };

/* How blocks are decoded: a shuffle and shifts for words of four codes, the same for words of two, and for bytes of one;
 * levels of up to seven bits as a table, repeated where they are fewer than 32. */
typedef struct {
    __m512i spread, factor[4], spread_two, factor_two[2], spread_one, shift_one, levels[4];
    __mmask64 bytes, bytes_two; /* of a block, and of half of it */
    __mmask32 moved, moved_two; /* words whose first code is not in their low bits already */
    const uint8_t *end;         /* of the matrix: the first byte that must not be read */
    int bits;
} Words;

INLINE __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE __mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0; }

INLINE void prepare_levels(Words *words) {
    __m512 values[8];
    for (int v = 0; v < 8; v++) {
        __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m512i code = _mm512_add_epi32(_mm512_set1_epi32(LANES * v), lane);
        code = _mm512_and_si512(code, _mm512_set1_epi32((1 << words->bits) - 1));
        values[v] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(1 << (words->bits - 1))));
    }
    for (int v = 0; v < 4; v++) words->levels[v] = (__m512i)_mm512_cvtne2ps_pbh(values[2 * v + 1], values[2 * v]);
}

INLINE void prepare_words(Words *words, int bits, Meaning meaning, const uint8_t *end) {
    uint8_t spread[2][64] __attribute__((aligned(64)));
    uint16_t factor[6][32] __attribute__((aligned(64)));
    words->moved = words->moved_two = 0;
    for (int j = 0; j < 32; j++)
        for (int two = 0; two < 2; two++) {
            int codes = two ? 2 : 4, bit = codes * bits * j;
            spread[two][2 * j] = (uint8_t)(bit / 8);
            spread[two][2 * j + 1] = (uint8_t)((bit / 8 + 1) & 63);
            for (int k = 0; k < codes; k++) factor[4 * two + k][j] = (uint16_t)(0x10000 >> (bit % 8 + bits * k));
            if (bit % 8) *(two ? &words->moved_two : &words->moved) |= 1u << j;
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
    for (int k = 0; k < 4; k++) words->factor[k] = _mm512_load_si512(factor[k]);
    for (int k = 0; k < 2; k++) words->factor_two[k] = _mm512_load_si512(factor[4 + k]);
    words->bits = bits, words->end = end;
    if (meaning == LEVEL) prepare_levels(words);
    words->bytes = first_bytes(RUN * bits / 8);
    words->bytes_two = first_bytes(RUN / 2 * bits / 8);
}

/* Code k of every word in its low bits. A product's upper half is a shift: shifts of 512 bits wait for the one port that
 * permutes, too, products have another one. */
INLINE __m512i codes_of(const Words *u, int codes, int k, __m512i bytes) {
    if (!k) return _mm512_mask_mulhi_epu16(bytes, codes == 4 ? u->moved : u->moved_two, bytes, codes == 4 ? u->factor[0] : u->factor_two[0]);
    return _mm512_mulhi_epu16(bytes, codes == 4 ? u->factor[k] : u->factor_two[k]);
}

/* Two words in all places. */
INLINE __m512i pair_at(const uint16_t *at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/* A table of `apart` words, repeated until it fills 32 lanes. */
INLINE __m512i repeated(const uint16_t *at, int apart) {
    if (apart == 8) return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at));
    if (apart == 16) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)at));
    if (apart == 4) return _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)at));
    return pair_at(at);
}

/* Entries of a group as words, repeated until they fill 32 lanes. */
INLINE __m512i word_table(const void *lut, int64_t dtype, int64_t group, int bits) {
    if (dtype == BFLOAT16) return repeated((const uint16_t *)lut + (group << bits), 1 << bits);
    if (dtype == FLOAT16 && bits == 3) {
        __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)lut + group));
        return _mm512_broadcast_i32x4((__m128i)_mm256_cvtneps_pbh(entries));
    }
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)small_table(lut, dtype, group, bits));
    return _mm512_broadcast_i64x4(half);
}

/* Vector k of a block takes lanes whose column, 4j + k (2j + k with `codes` 2), lies in [first, last). */
INLINE __mmask32 lanes_of(int codes, int k, int64_t first, int64_t last) {
    return first_words((last - k + codes - 1) / codes) & ~first_words((first - k + codes - 1) / codes);
}

/* The bytes in `inside` and, where they may be read, those behind them: a mask costs a load an instruction more. */
INLINE __m512i bytes_at(const Words *u, const uint8_t *p, __mmask64 inside) {
    return __builtin_expect(p + 64 <= u->end, 1) ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(inside, p);
}

/* Weights of a block of 128 or, with `codes` 2, of 64 columns, of which `left` are there and lie in one tile. */
INLINE void decode_run(const Words *u, int codes, const uint8_t *p, int64_t left, __m512i table, __m512i w[]) {
    int64_t whole = 32 * codes;
    __mmask64 inside = left < whole ? first_bytes((left * u->bits + 7) / 8) : codes == 4 ? u->bytes : u->bytes_two;
    __m512i bytes = _mm512_permutexvar_epi8(codes == 4 ? u->spread : u->spread_two, bytes_at(u, p, inside));
    for (int k = 0; k < codes; k++) {
        __m512i at = codes_of(u, codes, k, bytes);
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
            __m512i at = codes_of(u, codes, k, bytes);
            __mmask32 lanes = lanes_of(codes, k, from - column, stop - column);
            w[k] = _mm512_mask_permutexvar_epi16(w[k], lanes, at, table);
        }
        from = stop;
    }
}

/* 16 entries of a table as words, of which those in `inside` are there. */
INLINE __m256i sixteen_words(const void *lut, int64_t dtype, int64_t at, __mmask16 inside) {
    if (dtype == FLOAT32) return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, (const float *)lut + at));
    __m256i words = _mm256_maskz_loadu_epi16(inside, (const uint16_t *)lut + at);
    return dtype == BFLOAT16 ? words : (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(words));
}

NOINLINE float8_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    for (int64_t i = 0; i < groups; i++)
        _mm512_mask_storeu_epi16(to + 16 * i, 0xffff, word_table(part->lut, part->lut_dtype, group + i, bits));
}

/* The tables of `groups` groups as words, each a number of entries apart that is returned. */
INLINE int word_tables(const Part *part, int64_t group, int64_t groups, int bits, uint16_t *to) {
    int64_t first = group << bits, last = (group + groups) << bits;
    if (part->lut_dtype == FLOAT8_E4M3) {
        float8_tables(part, group, groups, bits, to);
        return 16;
    }
    for (int64_t at = first; at < last; at += LANES, to += LANES)
        _mm256_store_si256((__m256i *)to, sixteen_words(part->lut, part->lut_dtype, at, (__mmask16)first_words(last - at)));
    return 1 << bits;
}

/* The tables of a row of tiles, whose widths are multiples of half a block, from column `from` to `end`, at most SHORT_BLOCKS
 * blocks: for each block the tables of both halves, or that of the one half that is left. */
INLINE void tables_of_row(const Call *call, const Part *part, int64_t row, int64_t from, int64_t end, __m512i tables[]) {
    uint16_t words[SHORT_BLOCKS * 2 * 16] __attribute__((aligned(64)));
    int64_t tile = part->tile_columns, left = tile - from % tile;
    int64_t groups = (end - from + tile - left + tile - 1) / tile;
    int apart = word_tables(part, group_at(call, part, row, from), groups, call->bits, words);
    const uint16_t *at = words;
    for (; from < end; from += RUN, tables++) {
        *tables = repeated(at, apart);
        if (!(left -= RUN / 2)) at += apart, left = tile;
        if (end - from < RUN) break;
        *tables = _mm512_mask_blend_epi64(0xf0, *tables, repeated(at, apart));
        if (!(left -= RUN / 2)) at += apart, left = tile;
    }
}

/* Weights of a whole block whose halves have a table each: bit 4 of a lane's number, the half, chooses it. */
INLINE void decode_halves(const Words *u, const uint8_t *p, __m512i table, __m512i w[]) {
    __m512i bytes = _mm512_permutexvar_epi8(u->spread, bytes_at(u, p, u->bytes));
    __m512i upper = _mm512_maskz_set1_epi16(0xffff0000u, 16), code = _mm512_set1_epi16(15);
    for (int k = 0; k < 4; k++) {
        __m512i at = _mm512_ternarylogic_epi64(codes_of(u, 4, k, bytes), code, upper, 0xea); /* a & b | c */
        w[k] = _mm512_permutexvar_epi16(at, table);
    }
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
    __m512i table = repeated(tables->at, tables->apart);
    if (!last && ++tables->used == tables->tile_rows) tables->at += tables->apart, tables->used = 0;
    return table;
}

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

/* Products of bfloat16 pairs where a code has more than four bits, or is a level of a row-scaled matrix.
 *
 * 64 columns at a time, in their order: a byte shuffle brings each qword its eight codes, a multishift each byte its own.
 * Entries of tables are looked up by permutes of words, two registers of them at once and the rest by blends. Levels are
 * small integers, which bfloat16 holds exactly.
 */
#define WIDE 64       /* columns of a block */
#define BYTE_TOKENS 4 /* from so many on, levels of eight bits are multiplied as pairs */

/* The entries of a group as words, 32 in a vector. */
INLINE void wide_table(const Part *part, int64_t group, int bits, __m512i table[8]) {
    const void *lut = part->lut;
    int64_t dtype = part->lut_dtype, first = group << bits;
    float entries[MAX_K] __attribute__((aligned(64)));
    if (dtype == FLOAT8_E4M3) {
        load_entries(lut, dtype, group, bits, entries);
        lut = entries, dtype = FLOAT32, first = 0;
    }
    for (int v = 0; v < 1 << (bits - 5); v++, first += 32) {
        __m256i low = sixteen_words(lut, dtype, first, 0xffff), high = sixteen_words(lut, dtype, first + LANES, 0xffff);
        table[v] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
}

/* Entries of 32 codes from a table of 1, 2, 4 or 8 vectors; what is above a code's bits is not looked at. */
INLINE __m512i wide_entries(const __m512i table[8], __m512i codes, int vectors) {
    if (vectors == 1) return _mm512_permutexvar_epi16(codes, table[0]);
    __m512i found = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    if (vectors == 2) return found;
    __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    found = _mm512_mask_blend_epi16(upper, found, _mm512_permutex2var_epi16(table[2], codes, table[3]));
    if (vectors == 4) return found;
    __m512i high = _mm512_permutex2var_epi16(table[4], codes, table[5]);
    high = _mm512_mask_blend_epi16(upper, high, _mm512_permutex2var_epi16(table[6], codes, table[7]));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(128)), found, high);
}

/* Levels 16 * i to 16 * i + 15 as float32. */
INLINE __m512 sixteen(__m128i levels) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)); }

/* Weights of a block, of which `left` columns are there, by a table of `vectors` or, with 0, levels of eight bits. */
INLINE void decode_wide(
    int vectors, const Words *u, const uint8_t *p, int64_t left, const __m512i table[8], __m512i w[2]
) {
    __m512i codes = _mm512_maskz_loadu_epi8(left < WIDE ? first_bytes((left * u->bits + 7) / 8) : u->bytes_two, p);
    if (u->bits != 8) codes = _mm512_multishift_epi64_epi8(u->shift_one, _mm512_permutexvar_epi8(u->spread_one, codes));
    if (vectors) {
        w[0] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)), vectors);
        w[1] = wide_entries(table, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1)), vectors);
    } else {
        codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(-128));
        __m512 first = sixteen(_mm512_castsi512_si128(codes)), second = sixteen(_mm512_extracti32x4_epi32(codes, 1));
        w[0] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        first = sixteen(_mm512_extracti32x4_epi32(codes, 2)), second = sixteen(_mm512_extracti32x4_epi32(codes, 3));
        w[1] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }
    for (int v = 0; left < WIDE && v < 2; v++) w[v] = _mm512_maskz_mov_epi16(first_words(left - 32 * v), w[v]);
}

/* As `few_pairs`. */
INLINE void few_wide(
    int half, int vectors, int tokens, const Call *call, const Part *part, const Words *u, int64_t row, int count, int64_t from,
    int64_t end, const uint16_t *x, vf sums[][UNIT]
) {
    int64_t in_row = row_bytes(call), ahead = end - from == call->columns ? AHEAD : in_row;
    __m512i table[8];
    (void)half;
    if (call->meaning == LEVEL) memcpy(table, u->levels, sizeof u->levels);
    for (int64_t r = 0; r < count; r++) {
        const uint8_t *p = part->indices + (row + r) * in_row + from * call->bits / 8;
        const uint16_t *at = x + from * tokens;
        __m512 acc[FEW_TOKENS][2];
        __m512i w[2];
        for (int n = 0; n < tokens; n++)
            for (int v = 0; v < 2; v++) acc[n][v] = _mm512_setzero_ps();
        if (call->meaning == LARGE && (r == 0 || (row + r) % part->tile_rows == 0))
            wide_table(part, (row + r) / part->tile_rows, call->bits, table);
        for (int64_t column = from; column < end; column += WIDE, p += 8 * call->bits, at += WIDE * tokens) {
            __builtin_prefetch(p + ahead);
            decode_wide(vectors, u, p, end - column, table, w);
            for (int k = 0; k < 2; k++)
                for (int n = 0; n < tokens; n++)
                    acc[n][k] = add_pairs(acc[n][k], w[k], _mm512_load_si512(at + n * WIDE + 32 * k));
        }
        for (int n = 0; n < tokens; n++) {
            __m512 sum = _mm512_add_ps(acc[n][0], acc[n][1]);
            sums[n][r] = from ? sums[n][r] + (vf)sum : (vf)sum;
        }
    }
}

/* By the vectors of the table, none, 1, 2, 4 or 8. */
ALL_TOKENS(few_wide, 0, 0) ALL_TOKENS(few_wide, 0, 1) ALL_TOKENS(few_wide, 0, 2) ALL_TOKENS(few_wide, 0, 4) ALL_TOKENS(few_wide, 0, 8)
static FewPairs *const FEW_WIDE[5][4] = {
    {NAMES_BY_TOKENS(few_wide, 0, 0)}, {NAMES_BY_TOKENS(few_wide, 0, 1)}, {NAMES_BY_TOKENS(few_wide, 0, 2)},
    {NAMES_BY_TOKENS(few_wide, 0, 4)}, {NAMES_BY_TOKENS(few_wide, 0, 8)}
};

/* The place of the function for a call in lists as the one above. */
INLINE int kind_of_wide(const Call *call) {
    return call->meaning == BYTE ? 0 : call->bits <= 5 ? 1 : call->bits - 4;
}

/* One row of x in blocks, with zeros up to a whole one; blocks are `apart` words apart. */
INLINE void lay_out_wide(const uint16_t *x, int64_t columns, int64_t apart, uint16_t *to) {
    for (int64_t k = 0; k < columns; k += WIDE, to += apart)
        for (int v = 0; v < 2; v++)
            _mm512_store_si512(to + 32 * v, _mm512_maskz_loadu_epi16(first_words(columns - k - 32 * v), x + k + 32 * v));
}

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

/* Products of bfloat16 pairs with more than FEW_TOKENS tokens.
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

/* x as the loops read it: block by block that of each token, and zeros for those missing to a power of two. */
void edkm_pairs_lay_out(const Call *call, const void *of, int64_t x_row, const int *exponents, void *room) {
    const uint16_t *x = of;
    uint16_t *to = room;
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

int edkm_pairs_take(Call *call, const void *x, int64_t x_row, Part parts[MOST_PARTS], int exponents[16]) {
    if (!takes_pairs(call)) return 0;
    if (call->tokens > FEW_TOKENS) choose_multiply();
    call->half = takes_halves(call, x, x_row, exponents);
    if (!call->half) return 1;
    for (int64_t p = 0; p < call->count; p++) {
        parts[p] = call->parts[p];
        parts[p].lut_dtype = BFLOAT16; /* words are taken as they are */
    }
    for (int64_t n = 0; n < call->tokens; n++) call->unscale[n] = ldexpf(1, -exponents[n]);
    call->parts = parts;
    return 1;
}

void edkm_pairs_units(const Call *call, const Part *part, int64_t first, int64_t last) {
    Words words;
    prepare_words(&words, call->bits, call->meaning, part->indices + part->rows * row_bytes(call));
    for (int64_t i = first; i < last; i++)
        (is_few(call) ? pairs_of_unit : panels_of_unit)(
            call, part, &words, i * UNIT, (int)smaller(UNIT, part->rows - i * UNIT)
        );
}
#endif
