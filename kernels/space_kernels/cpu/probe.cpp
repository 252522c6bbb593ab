// What this processor can at most, to read other figures by.

#include <omp.h>

#include "export.h"
#include "network.h"

using namespace KIND;

extern "C" {

// Reads `count` floats from end to end; their sum, so that nobody may leave it out.
float EXPORT(read)(const float* from, int64_t count, int num_threads) {
    float sum = 0.0f;
#pragma omp parallel num_threads(num_threads) reduction(+ : sum)
    {
        const Share mine(count, 8 * LANES);
        Lanes part[8];
        for (Lanes& one : part) one = zeros();
        int64_t i = mine.first;
        for (; i + 8 * LANES <= mine.last; i += 8 * LANES)
            for (int n = 0; n < 8; ++n) {
                part[n] = add(part[n], load(from + i + n * LANES));
                __builtin_prefetch(from + i + n * LANES + 1024);
            }
        for (Lanes& one : part) sum += total(one);
    }
    return sum;
}

// So many products of sixteen pairs, twelve at a time; their sum.
float EXPORT(dots)(int64_t count, int num_threads) {
    float sum = 0.0f;
#pragma omp parallel num_threads(num_threads) reduction(+ : sum)
    {
        bf16 one[2 * LANES];
        for (bf16& x : one) x = 0x3c00;
        Pairs a = pairs(one), b = same_pair(one);
        Lanes part[12];
        for (Lanes& each : part) each = zeros();
        for (int64_t i = 0; i < count / 12; ++i)
#pragma GCC unroll 12
            for (int n = 0; n < 12; ++n) part[n] = dot(part[n], a, b);
        for (Lanes& each : part) sum += total(each);
    }
    return sum;
}
}
