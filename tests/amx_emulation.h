/* AMX in plain C, for one thread: what the kernels' tiles give where no processor has them. Sums as the manual has them: all
 * products of even columns, all of odd ones, their sum, and that added to the tile. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
#undef _tile_zero
#undef _tile_stream_loadd
#define __AMX_BF16__ 1
#define EDKM_EMULATED_AMX 1

static uint8_t emulated_tiles[8][16][64];

static float emulated_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(emulated_tiles[t], 0, sizeof emulated_tiles[t])
#define _tile_stream_loadd(t, at, stride) _tile_loadd(t, at, stride)
#define _tile_loadd(t, at, stride) \
    for (int i_ = 0; i_ < 16; i_++) memcpy(emulated_tiles[t][i_], (const char *)(at) + i_ * (stride), 64)
#define _tile_stored(t, at, stride) \
    for (int i_ = 0; i_ < 16; i_++) memcpy((char *)(at) + i_ * (stride), emulated_tiles[t][i_], 64)
#define _tile_dpbf16ps(to, a, b) emulated_product(to, a, b)

__attribute__((unused)) static void emulated_product(int to, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < 16; k++) {
                const uint16_t *left = (const uint16_t *)emulated_tiles[a][m] + 2 * k;
                const uint16_t *right = (const uint16_t *)emulated_tiles[b][k] + 2 * n;
                even += emulated_float(left[0]) * emulated_float(right[0]);
                odd += emulated_float(left[1]) * emulated_float(right[1]);
            }
            memcpy(&sum, emulated_tiles[to][m] + 4 * n, 4);
            sum += even + odd;
            memcpy(emulated_tiles[to][m] + 4 * n, &sum, 4);
        }
}
