// Intel's matrix unit on arrays: the instructions that grouped.h uses, by Intel's Software Developer's Manual, volume 2.
// Compilers include this file before native.cpp. What would be a fault of the processor aborts. Linux refuses the unit
// where REFUSE_MATRIX_UNIT is set.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Unit {
    bool is_configured = false;
    int row_bytes[8], rows[8];
    uint8_t registers[8][16][64];
};

inline Unit &unit() {
    static thread_local Unit instance;
    return instance;
}

inline void require(bool holds) {
    if (!holds) abort();
}

inline bool asked = false;

inline long arch_prctl(long number, long code, long feature) {
    require(number == SYS_arch_prctl && code == 0x1023 && feature == 18);
    asked = !getenv("REFUSE_MATRIX_UNIT");
    return asked ? 0 : -1;
}

inline void configure(const void *memory) {
    auto *bytes = static_cast<const uint8_t *>(memory);
    require(asked && bytes[0] == 1 && bytes[1] == 0);
    for (int i = 2; i < 16; i++) require(bytes[i] == 0);
    Unit &u = unit();
    u = {};
    for (int t = 0; t < 16; t++) {
        int row_bytes = bytes[16 + 2 * t] | bytes[17 + 2 * t] << 8, rows = bytes[48 + t];
        require(row_bytes <= 64 && rows <= 16 && (t < 8 || row_bytes + rows == 0) && !row_bytes == !rows);
        if (t < 8) u.row_bytes[t] = row_bytes, u.rows[t] = rows;
    }
    u.is_configured = true;
}

inline void release() { unit() = {}; }

inline Unit &configured(int t) {
    require(unit().is_configured && unit().rows[t]);
    return unit();
}

inline void zero(int t) { memset(configured(t).registers[t], 0, sizeof unit().registers[t]); }

inline void load(int t, const void *from, long stride) {
    zero(t);
    Unit &u = unit();
    for (int row = 0; row < u.rows[t]; row++)
        memcpy(u.registers[t][row], static_cast<const char *>(from) + row * stride, u.row_bytes[t]);
}

inline void store(int t, void *to, long stride) {
    Unit &u = configured(t);
    for (int row = 0; row < u.rows[t]; row++)
        memcpy(static_cast<char *>(to) + row * stride, u.registers[t][row], u.row_bytes[t]);
}

// c += a of signed bytes @ b of unsigned bytes, four at a time. Rows beyond those of c become zeros.
inline void dot_signed_unsigned(int c, int a, int b) {
    Unit &u = configured(c);
    require(configured(a).rows[a] == u.rows[c] && configured(b).row_bytes[b] == u.row_bytes[c]);
    require(u.row_bytes[a] == 4 * u.rows[b] && u.row_bytes[c] % 4 == 0 && c != a && c != b && a != b);
    for (int m = 0; m < u.rows[c]; m++) {
        int32_t sums[16];
        memcpy(sums, u.registers[c][m], sizeof sums);
        for (int k = 0; k < u.row_bytes[a] / 4; k++)
            for (int n = 0; n < u.row_bytes[c] / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += int8_t(u.registers[a][m][4 * k + i]) * u.registers[b][k][4 * n + i];
        memcpy(u.registers[c][m], sums, sizeof sums);
    }
}

}  // namespace emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define syscall emulated::arch_prctl
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbsud emulated::dot_signed_unsigned
#define __AMX_INT8__ 1
