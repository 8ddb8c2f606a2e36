// Compares the vector products of native.cpp with plain loops, on the processor that it is compiled for.

#include <cstdio>
#include <random>

#include "native.cpp"

template <int BITS> bool check_products(std::mt19937 &random) {
    UintWords words[2];
    IntWords x[2], sum{}, expected{};
    for (int k = 0; k < 1000; k++) {
        for (int i = 0; i < 2; i++)
            for (int word = 0; word < WORDS; word++) {
                uint32_t w = 0, numbers = 0;
                for (int byte = 0; byte < 4; byte++) {
                    int a = random() & ((1 << BITS) - 1), b = int(random() % 255) - 127;
                    w |= uint32_t(a) << 8 * byte, numbers |= uint32_t(uint8_t(b)) << 8 * byte;
                    expected[word] += a * b;
                }
                words[i][word] = w, x[i][word] = int32_t(numbers);
            }
        add_products<BITS>(sum, words, x[0], x[1]);
    }
    return !memcmp(&sum, &expected, sizeof sum);
}

bool check_halves() {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        if ((bits & 0x7c00) == 0x7c00) continue;  // not finite
        float sign = bits & 0x8000 ? -1 : 1, exact = bits >> 10 & 31 ? std::ldexp(float(1024 + (bits & 1023)), int(bits >> 10 & 31) - 25) : std::ldexp(float(bits & 1023), -24);
        if (half_to_float(Halves{} + uint16_t(bits))[0] != sign * exact) return false;
    }
    return true;
}

int main() {
    std::mt19937 random(1);
    bool products = check_products<4>(random) && check_products<5>(random) && check_products<6>(random) && check_products<8>(random);
    bool halves = check_halves();
    printf("%s: products %s, halves %s\n", INT8_INSTRUCTIONS, products ? "right" : "wrong", halves ? "right" : "wrong");
    return !(products && halves);
}
