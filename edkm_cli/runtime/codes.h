/* From packed indices to weights, 16 lanes at a time: shared by the kernels that compute with packed matrices.
 *
 * Sixteen b-bit codes are 2b bytes. A lane needs a window of two of them (a code crosses at most one byte border) and a
 * shift: byte shuffle, variable shift. A table of up to 16 float32 entries is a register or two, looked up by a permute
 * that reads the low bits of each lane only, so that nothing is masked; larger tables are gathered from the L1 cache (AVX2 and
 * NEON have loops of their own: lut_narrow.c).
 * With AVX-512 VBMI 64 codes are unpacked by one byte permute and one multishift.
 */
#ifndef EDKM_CODES
#define EDKM_CODES

#define LANES 16
#include "lanes.h"

enum { FLOAT8_E4M3 = 3 };

/* What a code means. SMALL: an entry of a table of at most 16; LARGE: of at most 256; LEVEL: code - 2^(b-1), scaled
 * once a row; BYTE: the same at 8 bits, where bytes need no unpacking. */
typedef enum { SMALL, LARGE, LEVEL, BYTE } Meaning;

/* How to unpack b-bit codes; `end` is the first byte that must not be read. */
typedef struct {
    const uint8_t *end;
    int bits;
    uint8_t window[64] __attribute__((aligned(64))); /* byte shuffle inside 16 bytes, per lane of 32 bits */
    int32_t shift[16] __attribute__((aligned(64)));
    uint8_t window64[64] __attribute__((aligned(64))), shift64[64] __attribute__((aligned(64))); /* 64 codes, by qwords */
    uint8_t window8[64] __attribute__((aligned(64))), shift8[64] __attribute__((aligned(64))); /* 64 codes, each to a byte */
} Unpacker;

INLINE void prepare(Unpacker *u, int bits, const uint8_t *end) {
    u->end = end;
    u->bits = bits;
    for (int lane = 0; lane < LANES; lane++) {
        int bit = lane * bits;
        for (int byte = 0; byte < 4; byte++) u->window[lane * 4 + byte] = byte < 2 ? (uint8_t)(bit / 8 + byte) : 0x80;
        if (bit / 8 + 1 >= 2 * bits) u->window[lane * 4 + 1] = 0x80; /* nothing of this code is there */
        u->shift[lane] = bit % 8;
    }
    for (int q = 0; q < 8; q++) /* qword q holds lanes 2q and 2q + 1 of four vectors: byte v, and byte 4 + v */
        for (int v = 0; v < 4; v++) {
            int bit = 2 * q * bits;
            u->window64[q * 8 + 2 * v] = (uint8_t)((2 * bits * v + bit / 8) & 63);
            u->window64[q * 8 + 2 * v + 1] = (uint8_t)((2 * bits * v + bit / 8 + 1) & 63);
            u->shift64[q * 8 + v] = (uint8_t)(16 * v + bit % 8);
            u->shift64[q * 8 + 4 + v] = (uint8_t)(16 * v + bit % 8 + bits);
        }
    for (int i = 0; i < 64; i++) { /* eight codes are `bits` bytes */
        u->window8[i] = (uint8_t)((i / 8 * bits + i % 8) & 63);
        u->shift8[i] = (uint8_t)(i % 8 * bits);
    }
}

/* Sixteen bytes that may be read: those at `p`, or at the end of the matrix a copy of what is left. */
INLINE const uint8_t *readable(const Unpacker *u, const uint8_t *p, uint8_t copy[16]) {
    if (__builtin_expect(p + 16 <= u->end, 1)) return p;
    memset(copy, 0, 16);
    if (p < u->end) memcpy(copy, p, (size_t)(u->end - p));
    return copy;
}

/* Codes of 16 weights from byte `p` on, in the low `bits` bits of each lane; what is above them is undefined. */
INLINE vi codes16(const Unpacker *u, const uint8_t *p) {
    uint8_t copy[16];
    p = readable(u, p, copy);
#if defined(__AVX512BW__)
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    bytes = _mm512_shuffle_epi8(bytes, _mm512_load_si512(u->window));
    return (vi)_mm512_srlv_epi32(bytes, _mm512_load_si512(u->shift));
#else
    vi codes;
    for (int lane = 0; lane < LANES; lane++) {
        int first = u->window[lane * 4], second = u->window[lane * 4 + 1];
        codes[lane] = (p[first] | (second < 16 ? p[second] << 8 : 0)) >> u->shift[lane];
    }
    return codes;
#endif
}

/* Codes of 64 weights, b at most 4: vector v holds weights 16v to 16v + 15, undefined above four bits. */
INLINE void codes64(const Unpacker *u, const uint8_t *p, vi codes[4]) {
#ifdef __AVX512VBMI__
    __mmask32 inside = (__mmask32)((1ull << (8 * u->bits)) - 1);
    __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(inside, p));
    bytes = _mm512_permutexvar_epi8(_mm512_load_si512(u->window64), bytes);
    bytes = _mm512_multishift_epi64_epi8(_mm512_load_si512(u->shift64), bytes);
    for (int v = 0; v < 4; v++) codes[v] = (vi)_mm512_srli_epi32(bytes, 8 * v);
#else
    for (int v = 0; v < 4; v++) codes[v] = codes16(u, p + 2 * u->bits * v);
#endif
}

INLINE float e4m3_to_float(uint8_t byte) {
    if ((byte & 0x7f) == 0x7f) return NAN;
    return half_to_float((uint16_t)((byte & 0x7f) << 7 | (byte & 0x80) << 8)) * 256.0f; /* exponent biases 15 and 7 */
}

/* The 2^bits entries of a group as float32. */
INLINE void load_entries(const void *lut, int64_t dtype, int64_t group, int bits, float *to) {
    int k = 1 << bits;
    if (dtype != FLOAT8_E4M3) load_run(lut, dtype, group * k, k, to);
    else
        for (int j = 0; j < k; j++) to[j] = e4m3_to_float(((const uint8_t *)lut)[group * k + j]);
}

/* A table of at most 16 entries, repeated until it fills 16 lanes, so that the bits above a code choose a copy. The
 * common dtype goes without memory: what was stored in parts would be loaded as a whole only after many cycles. */
INLINE vf small_table(const void *lut, int64_t dtype, int64_t group, int bits) {
#ifdef __AVX512F__
    const uint16_t *halves = (const uint16_t *)lut + (group << bits);
    if (dtype == FLOAT16 && bits == 3) {
        __m512 entries = _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves)));
        return (vf)_mm512_shuffle_f32x4(entries, entries, 0x44);
    }
    if (dtype == FLOAT16 && bits == 4) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#endif
    vf table;
    load_entries(lut, dtype, group, bits, (float *)&table);
    for (int j = 1 << bits; j < LANES; j++) ((float *)&table)[j] = ((float *)&table)[j - (1 << bits)];
    return table;
}

INLINE vf small_entries(vf table, vi codes) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table);
#else
    vf out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = table[codes[lane] & 15];
    return out;
#endif
}

/* The table of one group: `small` in a register, or `large` in memory, loaded again only where the group changes. */
typedef struct {
    vf small;
    int64_t group;
    float large[MAX_K] __attribute__((aligned(64)));
} Table;

/* Entries rounded to bfloat16, as those of a dense weight in the dtype of its activations. */
INLINE void round_entries(float *entries, int count) {
    uint32_t bits[MAX_K];
    memcpy(bits, entries, count * sizeof(float));
    for (int j = 0; j < count; j++) bits[j] = (bits[j] + 0x7fff + (bits[j] >> 16 & 1)) & 0xffff0000u;
    memcpy(entries, bits, count * sizeof(float));
}

/* `x_dtype`: of the activations. */
INLINE void use_table(
    Meaning meaning, Table *table, const void *lut, int64_t dtype, int64_t x_dtype, int64_t group, int bits
) {
    if (meaning == SMALL) {
        table->small = small_table(lut, dtype, group, bits);
        if (x_dtype == BFLOAT16) round_entries((float *)&table->small, LANES);
    } else if (meaning == LARGE && group != table->group) {
        load_entries(lut, dtype, table->group = group, bits, table->large);
        if (x_dtype == BFLOAT16) round_entries(table->large, 1 << bits);
    }
}

INLINE vf large_entries(const float *table, vi codes, int bits) {
    codes &= splat_int((1 << bits) - 1);
#if defined(__AVX512F__)
    __m512 first = _mm512_load_ps(table), second = _mm512_load_ps(table + 16); /* gathering costs ten times as much */
    if (bits == 5) return (vf)_mm512_permutex2var_ps(first, (__m512i)codes, second);
    if (bits == 6) {
        __m512 third = _mm512_load_ps(table + 32), fourth = _mm512_load_ps(table + 48);
        __mmask16 upper = _mm512_test_epi32_mask((__m512i)codes, _mm512_set1_epi32(32));
        return (vf)_mm512_mask_blend_ps(
            upper, _mm512_permutex2var_ps(first, (__m512i)codes, second), _mm512_permutex2var_ps(third, (__m512i)codes, fourth)
        );
    }
    return (vf)_mm512_i32gather_ps((__m512i)codes, table, 4);
#else
    vf out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = table[codes[lane]];
    return out;
#endif
}

/* 16 signed levels of 8-bit codes: code - 128. */
INLINE vf byte_levels(const Unpacker *u, const uint8_t *p) {
    uint8_t copy[16];
    p = readable(u, p, copy);
#if defined(__AVX512F__)
    vi codes = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi codes;
    for (int lane = 0; lane < LANES; lane++) codes[lane] = p[lane];
#endif
    return __builtin_convertvector(codes - splat_int(128), vf);
}

/* 16 weights from byte `p` on; a level still lacks its row's scale. */
INLINE vf weights16(Meaning meaning, const Unpacker *u, const Table *table, const uint8_t *p) {
    if (meaning == BYTE) return byte_levels(u, p);
    vi codes = codes16(u, p);
    if (meaning == SMALL) return small_entries(table->small, codes);
    if (meaning == LARGE) return large_entries(table->large, codes, u->bits);
    return __builtin_convertvector((codes & splat_int((1 << u->bits) - 1)) - splat_int(1 << (u->bits - 1)), vf);
}

#ifdef __AVX512VBMI__
/* 64 signed levels of fewer than 8 bits: a byte shuffle brings each qword its eight codes, a multishift each byte its own. */
INLINE void levels64(const Unpacker *u, const uint8_t *p, vf levels[4]) {
    __m512i bytes = _mm512_maskz_loadu_epi8((1ull << (8 * u->bits)) - 1, p);
    bytes = _mm512_permutexvar_epi8(_mm512_load_si512(u->window8), bytes);
    bytes = _mm512_multishift_epi64_epi8(_mm512_load_si512(u->shift8), bytes);
    bytes = _mm512_and_si512(bytes, _mm512_set1_epi8((char)((1 << u->bits) - 1)));
    bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8((char)(1 << (u->bits - 1))));
    levels[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_castsi512_si128(bytes)));
    levels[1] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 1)));
    levels[2] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 2)));
    levels[3] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(bytes, 3)));
}
#endif

/* 64 weights from byte `p` on. */
INLINE void weights64(Meaning meaning, const Unpacker *u, const Table *table, const uint8_t *p, vf weights[4]) {
    if (meaning == SMALL) {
        vi codes[4];
        codes64(u, p, codes);
        for (int v = 0; v < 4; v++) weights[v] = small_entries(table->small, codes[v]);
#ifdef __AVX512VBMI__
    } else if (meaning == LEVEL) {
        levels64(u, p, weights);
#endif
    } else {
        for (int v = 0; v < 4; v++) weights[v] = weights16(meaning, u, table, p + 2 * u->bits * v);
    }
}

#endif
