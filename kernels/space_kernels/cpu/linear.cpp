#include "linear.h"

namespace KIND {

// Whether a matmul is by AMX in bfloat16.
static bool by_tiles(const Linear& w) { return TILES && w.groups == Groups::NONE; }

void multiply(const Linear& w, const Matmul& p, int64_t first, int64_t last, bool fresh) {
    if (by_tiles(w))
        multiply_by_tiles(w, p, first, last, fresh);
    else
        multiply_by_lanes(w, p, first, last, fresh);
}

#if !TILES
void multiply_by_tiles(const Linear&, const Matmul&, int64_t, int64_t, bool) {}
void add_deltas_by_tiles(const Matmul&, Lanes*, int64_t, int64_t, int64_t, int) {}
#endif

void finish(const Linear& w, const Matmul& p, Lanes* sum, int64_t row, int64_t rows, int64_t panel, int count) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < count; ++j) {
            Lanes& one = sum[i * count + j];
            if (w.scale) one = mul(one, load(w.scale + (panel + j) * LANES));
            if (w.bias) one = add(one, load(w.bias + (panel + j) * LANES));
        }
    if (p.num_gated) (by_tiles(w) ? add_deltas_by_tiles : add_deltas_by_lanes)(p, sum, row, rows, panel, count);
    if (p.then == Then::SWIGLU) {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j + 1 < count; j += 2) {
                bf16* y = (bf16*)p.y + (row + i) * p.y_stride + (panel + j) / 2 * LANES;
                store(y, mul(silu(sum[i * count + j]), sum[i * count + j + 1]));
            }
        return;
    }
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < count; ++j) {
            Lanes one = sum[i * count + j];
            const int64_t place = (row + i) * p.y_stride + (panel + j) * LANES;
            const int64_t real = w.outputs - (panel + j) * LANES;
            if (real >= LANES) {
                if (p.then == Then::ADD) one = add(one, load(p.other + place));
                if (p.wide)
                    store((float*)p.y + place, one);
                else
                    store((bf16*)p.y + place, one);
                continue;
            }
            float lane[LANES];
            store(lane, one);
            for (int64_t n = 0; n < real; ++n) {
                float value = p.then == Then::ADD ? lane[n] + widen(p.other[place + n]) : lane[n];
                if (p.wide)
                    ((float*)p.y)[place + n] = value;
                else
                    ((bf16*)p.y)[place + n] = round(value);
            }
        }
}

void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    const int64_t steps = padded(inputs) / 2;
    for (int64_t n = 0; n < (outputs + LANES - 1) / LANES * LANES; ++n)
        for (int64_t k = 0; k < 2 * steps; ++k) {
            const bool real = n < outputs && k < inputs;
            panels[((n / LANES * steps + k / 2) * LANES + n % LANES) * 2 + k % 2] = real ? weight[n * inputs + k] : 0;
        }
}

}  // namespace KIND
