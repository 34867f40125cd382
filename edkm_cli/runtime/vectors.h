/* Sums over lanes, transposition, and rounding of results: blocks of LANES vectors of as many lanes. */
#ifndef EDKM_VECTORS
#define EDKM_VECTORS

#include "lanes.h"

typedef uint16_t words __attribute__((vector_size(2 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

INLINE vf load_x(const float *x) { return *(const vf *)x; }
INLINE void put(float *to, vf x) { *(vfu *)to = (vfu)x; }

/* LANES numbers of a dtype. */
INLINE vf read_lanes(const void *data, int64_t dtype, int64_t at) {
    vf x;
    if (dtype != BFLOAT16) {
        load_run(data, dtype, at, LANES, (float *)&x);
        return x;
    }
    const uint16_t *from = (const uint16_t *)data + at;
#if defined(__AVX512F__) && LANES == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif defined(__AVX2__) && LANES == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    words bits;
    memcpy(&bits, from, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
#endif
}

/* out[i] = sum of the lanes of vectors[i], for LANES vectors. */
INLINE vf sum_lanes(const vf *vectors) {
#ifdef __AVX512F__
    __m512 a[16];
    for (int i = 0; i < 16; i++) a[i] = (__m512)vectors[i];
    for (int i = 0; i < 8; i++) /* halves: rows i and i + 8 */
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 8], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 8], 0xee));
    for (int i = 0; i < 4; i++) /* quarters: rows i, i + 8; i + 4, i + 12 */
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 2]), _mm512_unpackhi_ps(a[i], a[i + 2]));
    a[0] = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps(order, a[0]);
#elif defined(__AVX2__) && LANES == 8
    __m256 a[4];
    for (int i = 0; i < 4; i++) a[i] = _mm256_hadd_ps((__m256)vectors[2 * i], (__m256)vectors[2 * i + 1]);
    a[0] = _mm256_hadd_ps(a[0], a[1]), a[2] = _mm256_hadd_ps(a[2], a[3]); /* sums of a lower half, then of an upper one */
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(a[0], a[2], 0x20), _mm256_permute2f128_ps(a[0], a[2], 0x31));
#elif defined(__ARM_NEON) && defined(__aarch64__) && LANES == 4
    return (vf)vpaddq_f32(vpaddq_f32(vectors[0], vectors[1]), vpaddq_f32(vectors[2], vectors[3]));
#else
    vf out = {};
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) out[i] += vectors[i][lane];
    return out;
#endif
}

INLINE void transpose(vf v[LANES]) {
#ifdef __AVX512F__
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) { /* lane 4q + c of b[i + c] .. b: rows i to i + 3 of column 4q + c */
            __m512d low = (__m512d)a[i + j], high = (__m512d)a[i + 2 + j];
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int c = 0; c < 4; c++) {
        __m512 low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        v[c] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[8 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
        low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd), high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        v[4 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0x88);
        v[12 + c] = (vf)_mm512_shuffle_f32x4(low, high, 0xdd);
    }
#else
    vf out[LANES];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) out[lane][i] = v[i][lane];
    memcpy(v, out, sizeof out);
#endif
}

INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    union { float f; uint32_t u; } in = {x}, half = {.u = 0x3f000000u};
    uint32_t sign = in.u & 0x80000000u;
    in.u ^= sign;
    if (in.u >= 0x47800000u) return (uint16_t)(sign >> 16 | (in.u > 0x7f800000u ? 0x7e00 : 0x7c00)); /* too large, NaN */
    if (in.u < 0x38800000u) { /* a denormal half: let an addition round */
        in.f += half.f;
        return (uint16_t)(sign >> 16 | (in.u - half.u));
    }
    in.u += 0xc8000000u + 0xfff + (in.u >> 13 & 1); /* exponent bias 127 to 15 */
    return (uint16_t)(sign >> 16 | in.u >> 13);
#endif
}

/* Rounds to nearest even and writes the first `count` lanes. */
INLINE void write_lanes(void *data, int64_t dtype, int64_t at, vf y, int count) {
    if (dtype == FLOAT32) {
        if (count == LANES) put((float *)data + at, y);
        else memcpy((float *)data + at, &y, count * sizeof(float));
        return;
    }
    words rounded;
    if (dtype == BFLOAT16) {
        vu bits = (vu)y, nan = (vu)(y != y);
        rounded = __builtin_convertvector((((bits + 0x7fff + (bits >> 16 & 1)) & ~nan) | ((bits | 0x400000) & nan)) >> 16, words);
    } else {
        for (int i = 0; i < LANES; i++) rounded[i] = to_half(y[i]);
    }
    if (count == LANES) memcpy((uint16_t *)data + at, &rounded, sizeof rounded);
    else memcpy((uint16_t *)data + at, &rounded, count * sizeof(uint16_t));
}

#endif
