/* What all CPU kernels share: 16 float lanes (AVX2 eight, NEON four), the rectangles of a tiled matrix, loads and stores in three
 * dtypes.
 *
 * Vectors are GNU C vector extensions, which gcc and clang lower to whatever the machine has; two operations that
 * plain C cannot name (minimum, half to float) use AVX-512 where it is.
 */
#ifndef EDKM_LANES
#define EDKM_LANES

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LANES /* compilers put vectors of two registers into memory; kernels whose layout has 16 lanes say so first */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define LANES 8
#elif defined(__ARM_NEON)
#define LANES 4
#else
#define LANES 16
#endif
#endif
#define BLOCK (LANES < 8 ? 256 : 1024) /* weights worked on at a time, whose sums are float32 before they go to double */
#define MAX_K 256
#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.4426950408889634

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4 * LANES)));
typedef float vfu __attribute__((vector_size(4 * LANES), aligned(4)));

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* A matrix (out, stride) cut into tiles of (tile_rows, tile_columns); a row of tiles is cut into `parts` units of whole
 * matrix rows, so that one large group keeps several threads busy. Partial sums are indexed [unit][tile column]. */
typedef struct {
    int64_t stride, tile_rows, tile_columns, parts, k;
} Layout;

/* `one_row`: not 0 where only one row is stored, which all rows share. */
typedef struct {
    const void *data;
    int64_t dtype, one_row;
} Matrix;

/* One unit's part of one tile, and a rectangle of at most BLOCK weights inside it. */
typedef struct {
    int64_t row, end_row, column, end_column, group, slot;
} Piece;

typedef struct {
    int64_t row, rows, column, columns;
} Rect;

INLINE Piece piece_of(const Layout *layout, int64_t unit, int64_t tile_column) {
    int64_t across = layout->stride / layout->tile_columns;
    int64_t tile_row = unit / layout->parts, part = unit % layout->parts, top = tile_row * layout->tile_rows;
    return (Piece){
        top + layout->tile_rows * part / layout->parts, top + layout->tile_rows * (part + 1) / layout->parts,
        tile_column * layout->tile_columns, (tile_column + 1) * layout->tile_columns,
        tile_row * across + tile_column, unit * across + tile_column,
    };
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Rect rect_at(const Piece *piece, int64_t row, int64_t column) {
    int64_t columns = smaller(piece->end_column - column, BLOCK);
    int64_t rows = columns == piece->end_column - piece->column ? BLOCK / columns : 1;
    return (Rect){row, row < piece->end_row ? smaller(rows, piece->end_row - row) : 0, column, columns};
}

INLINE Rect next_rect(const Piece *piece, Rect at) {
    if (at.column + at.columns < piece->end_column) return rect_at(piece, at.row, at.column + at.columns);
    return rect_at(piece, at.row + at.rows, piece->column);
}

#define FOR_PIECES(layout, piece, first_unit, last_unit)                                      \
    for (int64_t unit = first_unit; unit < last_unit; unit++)                                 \
        for (int64_t across = 0; across < (layout)->stride / (layout)->tile_columns; across++) \
            for (Piece piece = piece_of(layout, unit, across), *once = &piece; once; once = 0)

#define FOR_RECTS(piece, rect)                                               \
    for (Rect rect = rect_at(&(piece), (piece).row, (piece).column); rect.rows > 0; rect = next_rect(&(piece), rect))

INLINE float half_to_float(uint16_t half) {
    union { uint32_t u; float f; } bits = {(uint32_t)(half & 0x7fff) << 13}, scale = {(uint32_t)(254 - 15) << 23};
    if ((half & 0x7c00) == 0x7c00) bits.u |= 0x7f800000u;
    else bits.f *= scale.f;
    bits.u |= (uint32_t)(half & 0x8000) << 16;
    return bits.f;
}

/* Floats as their bits: what is written as one may be read as the other. */
typedef uint32_t __attribute__((may_alias)) Bits;

INLINE void load_run(const void *data, int64_t dtype, int64_t offset, int64_t count, float *to) {
    if (dtype == FLOAT32) {
        memcpy(to, (const float *)data + offset, count * sizeof(float));
    } else if (dtype == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)data + offset;
        Bits *bits = (Bits *)to;
        for (int64_t i = 0; i < count; i++) bits[i] = (Bits)from[i] << 16;
    } else {
        const uint16_t *from = (const uint16_t *)data + offset;
        int64_t i = 0;
#ifdef __AVX512F__
        for (; i + LANES <= count; i += LANES)
            _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#elif defined(__F16C__) && defined(__AVX__)
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#elif defined(__ARM_NEON) && defined(__aarch64__)
        for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
        for (; i < count; i++) to[i] = half_to_float(from[i]);
    }
}

/* Reads a rectangle into `to`, which is aligned and holds BLOCK floats; returns the count. The last vector is filled up
 * with copies of the first weight, which are masked where they would count. */
INLINE int64_t load(const Matrix *matrix, const Layout *layout, Rect rect, float *to) {
    int64_t stride = matrix->one_row ? 0 : layout->stride;
    for (int64_t r = 0; r < rect.rows; r++)
        load_run(matrix->data, matrix->dtype, (rect.row + r) * stride + rect.column, rect.columns, to + r * rect.columns);
    int64_t count = rect.rows * rect.columns;
    for (int64_t i = count; i % LANES; i++) to[i] = to[0];
    return count;
}

INLINE void store(void *data, int64_t dtype, const Layout *layout, Rect rect, const float *from) {
    for (int64_t r = 0; r < rect.rows; r++, from += rect.columns) {
        int64_t offset = (rect.row + r) * layout->stride + rect.column;
        if (dtype == FLOAT32) {
            memcpy((float *)data + offset, from, rect.columns * sizeof(float));
        } else { /* bfloat16, round to nearest even; NaN never gets here */
            uint16_t *to = (uint16_t *)data + offset;
            const Bits *bits = (const Bits *)from;
            for (int64_t i = 0; i < rect.columns; i++)
                to[i] = (uint16_t)((bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16);
        }
    }
}

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vi splat_int(int32_t x) { return x - (vi){}; }
INLINE vf keep(vf x, vi mask) { return (vf)((vi)x & mask); }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* a < b ? yes : no, lane by lane, and a sum that takes `more` where two integers are equal: one masked instruction each. */
#ifdef __AVX512F__
INLINE vf choose_if_less(vf a, vf b, vf yes, vf no) {
    return (vf)_mm512_mask_mov_ps((__m512)no, _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ), (__m512)yes);
}
INLINE vf add_if_equal(vf sum, vi a, vi b, vf more) {
    return (vf)_mm512_mask_add_ps((__m512)sum, _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b), (__m512)sum, (__m512)more);
}
INLINE vf least(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vf greatest(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
INLINE vf choose_if_less(vf a, vf b, vf yes, vf no) { return choose(a < b, yes, no); }
INLINE vf add_if_equal(vf sum, vi a, vi b, vf more) { return sum + keep(more, a == b); }
INLINE vf least(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf greatest(vf a, vf b) { return choose(a > b, a, b); }
#endif

/* 2^y for y <= 0, 0 below -126. Degree 6 on [-1/2, 1/2] (Cephes' coefficients), good to about one unit in the last place. */
INLINE vf exp2_negative(vf y) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    vi alive = y > splat(-126.0f);
    y = greatest(y, splat(-126.0f));
    vf shifted = y + magic;
    vf f = y - (shifted - magic);
    vf p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return keep((vf)((vi)p + ((vi)shifted << 23)), alive);
}

/* Attention of far centroids times small distances falls below float32's normal range, where x86 takes a hundred cycles
 * an operation. Such results become zero until `restore`; denormal weights are still read as what they are. */
#ifdef __SSE__
INLINE unsigned flush_tiny(void) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8000);
    return before;
}
INLINE void restore(unsigned before) { _mm_setcsr(before); }
#else
INLINE unsigned flush_tiny(void) { return 0; }
INLINE void restore(unsigned before) { (void)before; }
#endif

/* Lanes of vector number `v` that hold one of `count` weights. */
INLINE vi valid(int64_t v, int64_t count) {
    vi lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    return lane < splat_int((int32_t)(count - v * LANES));
}

INLINE double total(vf x) {
    double sum = 0;
    for (int l = 0; l < LANES; l++) sum += x[l];
    return sum;
}

#endif
