/* The loops of lut_linear.c for AVX2, eight weights at a time: compilers put sums of 16 lanes into memory there.
 *
 * Eight b-bit codes are b bytes. Up to four bits, a lane shifts its code out of the 32 bits that all lanes get; wider codes are
 * brought to their lanes by a byte shuffle. A permute looks up eight entries by the low three bits of a code; what is above
 * chooses among permutes of the other entries, or, below three bits, a copy of the table.
 */
#include "lut_call.h"

#if HAS_OCTETS

#define ROWS 2    /* of W at a time, with up to four tokens */
#define SUMS 6    /* rows of W times 16 tokens whose sums are in registers */
#define READ 16   /* bytes that a load may take */

/* How eight codes become weights: by permutes of so many vectors of entries, by gathering, or as levels. */
typedef enum { ONE, TWO, FOUR, GATHERED, SIGNED, SIGNED_BYTES } Kind;

typedef struct {
    __m256i window, shift, mask;
    Kind kind;
    int bits;
} Octets;

typedef struct {
    __m256 small[4];
    float large[MAX_K] __attribute__((aligned(32)));
} Entries;

static Octets octets_of(const Call *call) {
    uint8_t window[32];
    int32_t shift[8];
    int bits = call->bits;
    Kind kind = call->meaning == BYTE ? SIGNED_BYTES : call->meaning == LEVEL ? SIGNED : bits <= 3 ? ONE : bits == 4 ? TWO :
                bits == 5 ? FOUR : GATHERED;
    for (int i = 0; i < 8; i++) {
        shift[i] = kind <= TWO ? i * bits : i * bits % 8;
        for (int byte = 0; byte < 4; byte++) window[4 * i + byte] = byte < 2 ? (uint8_t)(i * bits / 8 + byte) : 0x80;
    }
    Octets o = {_mm256_loadu_si256((const __m256i *)window), _mm256_loadu_si256((const __m256i *)shift),
                _mm256_set1_epi32((1 << bits) - 1), kind, bits};
    return o;
}

INLINE void use_entries(Kind kind, const Strip *s, int64_t row, int64_t column, Entries *to) {
    const Part *part = s->part;
    int bits = s->bits;
    if (kind >= SIGNED) return;
    int64_t group = group_at(s->call, part, row, column);
    int rounds = s->call->out_dtype == BFLOAT16;
    if (kind == ONE && bits == 3 && part->lut_dtype == FLOAT16) { /* without memory, as in small_table */
        __m256 entries = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)part->lut + (group << 3))));
        __m256i word = _mm256_castps_si256(entries), odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
        word = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))); /* as round_entries */
        word = _mm256_and_si256(word, _mm256_set1_epi32((int)0xffff0000));
        to->small[0] = rounds ? _mm256_castsi256_ps(word) : entries;
        return;
    }
    load_entries(part->lut, part->lut_dtype, group, bits, to->large);
    if (rounds) round_entries(to->large, 1 << bits);
    for (int j = 1 << bits; j < 8; j++) to->large[j] = to->large[j - (1 << bits)];
    for (int v = 0; v < (kind == ONE ? 1 : kind == TWO ? 2 : kind == FOUR ? 4 : 0); v++)
        to->small[v] = _mm256_load_ps(to->large + 8 * v);
}

INLINE __m256 of_two(const __m256 *entries, __m256i codes) { /* bit 3 is moved to the sign, where blendv looks */
    return _mm256_blendv_ps(
        _mm256_permutevar8x32_ps(entries[0], codes), _mm256_permutevar8x32_ps(entries[1], codes),
        _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28))
    );
}

/* Eight weights from byte `p` on, levels unscaled. */
INLINE __m256 octet(Kind kind, const Octets *o, const Entries *entries, const uint8_t *p) {
    __m256i codes;
    if (kind <= TWO) {
        int32_t all;
        memcpy(&all, p, sizeof all);
        codes = _mm256_srlv_epi32(_mm256_set1_epi32(all), o->shift);
        return kind == ONE ? _mm256_permutevar8x32_ps(entries->small[0], codes) : of_two(entries->small, codes);
    }
    if (kind == SIGNED_BYTES) {
        __m128i bytes = _mm_xor_si128(_mm_loadl_epi64((const __m128i *)p), _mm_set1_epi8((char)0x80));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)), o->window);
    codes = _mm256_srlv_epi32(codes, o->shift);
    if (kind == FOUR)
        return _mm256_blendv_ps(
            of_two(entries->small, codes), of_two(entries->small + 2, codes), _mm256_castsi256_ps(_mm256_slli_epi32(codes, 27))
        );
    codes = _mm256_and_si256(codes, o->mask);
    if (kind == GATHERED) return _mm256_i32gather_ps(entries->large, codes, 4);
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(1 << (o->bits - 1))));
}

/* Of `octets` from byte `p` on, those that may be loaded where they are; the others are at the end of the matrix. */
INLINE int64_t readable_octets(const Strip *s, const uint8_t *p, int64_t octets) {
    int64_t left = s->limit - p - READ;
    return left < 0 ? 0 : smaller(octets, left / s->bits + 1);
}

INLINE const uint8_t *copied(const Strip *s, const uint8_t *p, uint8_t copy[READ]) {
    memset(copy, 0, READ);
    memcpy(copy, p, (size_t)smaller(READ, s->limit - p));
    return copy;
}

INLINE void decode_octets(Kind kind, const Strip *s, const Octets *o, int64_t row, float *to) {
    const uint8_t *bytes = s->part->indices + row * row_bytes(s->call), *p;
    uint8_t copy[READ];
    Entries entries;
    for (int64_t from = s->from, stop; from < s->end; from = stop) {
        stop = smaller(s->end, (from / s->part->tile_columns + 1) * s->part->tile_columns);
        use_entries(kind, s, row, from, &entries);
        p = bytes + from * s->bits / 8;
        int64_t octets = (stop - from + 7) / 8, quick = readable_octets(s, p, octets), i = 0;
        for (; i < quick; i++, p += s->bits, to += 8) _mm256_storeu_ps(to, octet(kind, o, &entries, p));
        for (; i < octets; i++, p += s->bits, to += 8) _mm256_storeu_ps(to, octet(kind, o, &entries, copied(s, p, copy)));
        to += stop - from - 8 * octets;
    }
}

/* acc[r][n] += eight weights of each row times those of x. */
INLINE void add_octet(
    Kind kind, int tokens, const Octets *o, const Entries *entries, const uint8_t *const p[ROWS], int64_t at,
    const float *x, int64_t stride, __m256 acc[ROWS][4]
) {
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r++) {
        __m256 w = octet(kind, o, entries + r, p[r] + at);
#pragma GCC unroll 4
        for (int n = 0; n < tokens; n++) acc[r][n] = _mm256_fmadd_ps(w, _mm256_load_ps(x + n * stride), acc[r][n]);
    }
}

INLINE float sum_octet(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

/* y[n][r] = row r of a strip times token n, for all its rows and up to four tokens; x is padded with zeros. */
INLINE void few_octets(Kind kind, int tokens, const Strip *s, const Octets *o, const float *x, float y[4][UNIT]) {
    const Call *call = s->call;
    int64_t tile = s->part->tile_columns, stride = call->x_stride, size = row_bytes(call), bits = s->bits;
    Entries entries[ROWS];
    uint8_t copy[ROWS][READ];
    for (int first = 0; first < s->count; first += ROWS) {
        __m256 acc[ROWS][4] = {}, more[ROWS][4] = {};
        int64_t rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = s->row + smaller(first + r, s->count - 1);
        for (int64_t from = 0; from < call->columns; from += tile) {
            const uint8_t *p[ROWS], *ends[ROWS];
            const float *at = x + from;
            for (int r = 0; r < ROWS; r++) {
                p[r] = s->part->indices + rows[r] * size + from * bits / 8;
                use_entries(kind, s, rows[r], from, entries + r);
            }
            int64_t octets = (tile + 7) / 8, quick = readable_octets(s, p[ROWS - 1], octets), i = 0;
            for (; i + 2 <= quick; i += 2) {
                add_octet(kind, tokens, o, entries, p, i * bits, at + 8 * i, stride, acc);
                add_octet(kind, tokens, o, entries, p, (i + 1) * bits, at + 8 * i + 8, stride, tokens == 1 ? more : acc);
            }
            for (; i < octets; i++) {
                for (int r = 0; r < ROWS; r++) ends[r] = copied(s, p[r] + i * bits, copy[r]);
                add_octet(kind, tokens, o, entries, ends, 0, at + 8 * i, stride, acc);
            }
        }
        for (int r = 0; r < ROWS && first + r < s->count; r++)
            for (int n = 0; n < tokens; n++) y[n][first + r] = sum_octet(_mm256_add_ps(acc[r][n], more[r][n]));
    }
}

typedef void Decode(const Strip *, const Octets *, int64_t row, float *to);
typedef void Few(const Strip *, const Octets *, const float *x, float y[4][UNIT]);
#define FEW_OF(kind, tokens)                                                                          \
    NOINLINE few_##kind##_##tokens(const Strip *s, const Octets *o, const float *x, float y[4][UNIT]) { \
        few_octets(kind, tokens, s, o, x, y);                                                         \
    }
#define LOOPS_OF(kind)                                                                                                  \
    NOINLINE decode_##kind(const Strip *s, const Octets *o, int64_t row, float *to) { decode_octets(kind, s, o, row, to); } \
    FEW_OF(kind, 1) FEW_OF(kind, 2) FEW_OF(kind, 3) FEW_OF(kind, 4)
#define NAMES_OF(kind) {few_##kind##_1, few_##kind##_2, few_##kind##_3, few_##kind##_4}
LOOPS_OF(ONE) LOOPS_OF(TWO) LOOPS_OF(FOUR) LOOPS_OF(GATHERED) LOOPS_OF(SIGNED) LOOPS_OF(SIGNED_BYTES)

static Decode *const DECODE[] = {decode_ONE, decode_TWO, decode_FOUR, decode_GATHERED, decode_SIGNED, decode_SIGNED_BYTES};
static Few *const FEW[][4] = {NAMES_OF(ONE),      NAMES_OF(TWO),    NAMES_OF(FOUR),
                              NAMES_OF(GATHERED), NAMES_OF(SIGNED), NAMES_OF(SIGNED_BYTES)};

void edkm_octets_decode(const Strip *s, int64_t row, float *to) {
    Octets o = octets_of(s->call);
    DECODE[o.kind](s, &o, row, to);
}

/* A strip with all tokens, up to four at a time. */
void edkm_octets_few(Strip *s) {
    const Call *call = s->call;
    Octets o = octets_of(call);
    for (int64_t token = 0; token < call->tokens; token += 4) {
        float y[4][UNIT] __attribute__((aligned(64))) = {};
        int tokens = (int)smaller(4, call->tokens - token);
        FEW[o.kind][tokens - 1](s, &o, (const float *)call->x + token * call->x_stride, y);
        for (int n = 0; n < tokens; n++) finish(call, s->part, s->row, s->count, token + n, *(const vf *)y[n]);
    }
}

/* sums[r] += `rows` rows of W times 16 tokens; every 64 columns a sum starts anew, as in add_floats. */
INLINE void add_rows(int rows, const float *w, const float *x, int64_t vectors, float *sums) {
    for (int64_t from = 0; from < vectors; from += 64) {
        __m256 acc[SUMS][2] = {};
        for (int64_t k = from; k < smaller(from + 64, vectors); k++) {
            __m256 low = _mm256_load_ps(x + LANES * k), high = _mm256_load_ps(x + LANES * k + 8);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m256 one = _mm256_broadcast_ss(w + r * PANEL_ROW + k);
                acc[r][0] = _mm256_fmadd_ps(one, low, acc[r][0]), acc[r][1] = _mm256_fmadd_ps(one, high, acc[r][1]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++) {
                float *to = sums + LANES * r + 8 * half;
                _mm256_store_ps(to, _mm256_add_ps(_mm256_load_ps(to), acc[r][half]));
            }
    }
}

void edkm_octets_add(const Decoded *w, const char *x, int64_t vectors, int64_t apart, int64_t panels, vf sums[][UNIT]) {
    for (int64_t p = 0; p < panels; p++, x += apart) {
        int row = 0;
        for (; row + SUMS <= UNIT; row += SUMS) add_rows(SUMS, w->floats[row], (const float *)x, vectors, (float *)&sums[p][row]);
        add_rows(UNIT % SUMS, w->floats[row], (const float *)x, vectors, (float *)&sums[p][row]);
    }
}

#endif
