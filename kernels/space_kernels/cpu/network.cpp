#include "network.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace KIND {

void norm_row(const bf16* x, const bf16* weight, int64_t width, float eps, bf16* out) {
    Lanes squares = zeros();
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        Lanes v = load(x + i);
        squares = fma(v, v, squares);
    }
    for (; i < width; ++i) rest += widen(x[i]) * widen(x[i]);
    const float scale = 1.0f / std::sqrt((total(squares) + rest) / float(width) + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, mul(mul(load(x + i), same(scale)), load(weight + i)));
    for (; i < width; ++i) out[i] = round(widen(x[i]) * scale * widen(weight[i]));
}

void turn_head(bf16* head, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Lanes first = load(head + i), second = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, sub(mul(first, c), mul(second, s)));
        store(head + half + i, add(mul(second, c), mul(first, s)));
    }
    for (; i < half; ++i) {
        const float first = widen(head[i]), second = widen(head[half + i]);
        head[i] = round(first * cos[i] - second * sin[i]);
        head[half + i] = round(second * cos[i] + first * sin[i]);
    }
}

Share::Share(int64_t count, int64_t unit) {
    const int64_t units = (count + unit - 1) / unit, n = omp_get_num_threads(), me = omp_get_thread_num();
    first = std::min(count, units * me / n * unit), last = std::min(count, units * (me + 1) / n * unit);
}

void turn_and_store(const Rows& rows, const Heads& heads, const Attention& a, const bf16* query_norm,
                    const bf16* key_norm, float eps, const float* cos, const float* sin) {
    const Share mine(rows.num_rows);
    const int64_t half = heads.dim / 2;
    for (int64_t row = mine.first; cos && row < mine.last; ++row) {
        const int64_t position = rows.starts[rows.owner[row]] + rows.offsets[row];
        for (int64_t h = 0; h < heads.query + heads.kv; ++h) {
            const bool is_query = h < heads.query;
            bf16* head = is_query ? a.query + row * a.query_stride + h * heads.dim
                                  : a.key + row * a.kv_stride + (h - heads.query) * heads.dim;
            const bf16* weight = is_query ? query_norm : key_norm;
            if (weight) norm_row(head, weight, heads.dim, eps, head);
            turn_head(head, cos + position * half, sin + position * half, heads.dim);
        }
    }
    store_rows(rows, heads, a, mine.first, std::min(mine.last, rows.num_chain_rows));
}

namespace {

void product(const Linear& w, const Product& p) {
    const Share panels(w.panels, TOGETHER);
    multiply(w, p, panels.first, panels.last);
#pragma omp barrier
}

void norms(const bf16* x, const bf16* weight, int64_t width, float eps, bf16* out, int64_t num_rows) {
    const Share rows(num_rows);
    for (int64_t row = rows.first; row < rows.last; ++row) norm_row(x + row * width, weight, width, eps, out + row * width);
#pragma omp barrier
}

void layer_forward(const Network& net, const Layer& layer, const Rows& rows, const Buffers& b,
                   std::atomic<int64_t>& next) {
    const auto [num_query, num_kv, dim] = net.heads;
    const int64_t num_rows = rows.num_rows, width = (num_query + 2 * num_kv) * dim, joined = num_query * dim;
    norms(b.x, layer.attention_norm, net.hidden, net.eps, b.normed, num_rows);
    product(layer.query_key_value,
            {b.normed, num_rows, net.hidden, b.fused, width, false, Then::NOTHING, nullptr});

    const Attention a{b.fused, b.fused + joined, b.fused + joined + num_kv * dim, width, width, layer.key_pages,
                      layer.value_pages, net.block_size, b.attended, net.scale, 0.0f, layer.window};
    turn_and_store(rows, net.heads, a, layer.query_norm, layer.key_norm, net.eps, net.cos, net.sin);
#pragma omp barrier
    for (int64_t item; (item = next.fetch_add(1)) < rows.num_tiles * num_kv;) attend(rows, net.heads, a, item);
#pragma omp barrier
    if (omp_get_thread_num() == 0) next = 0;

    product(layer.output, {b.attended, num_rows, joined, b.x, net.hidden, false, Then::ADD, b.x});
    norms(b.x, layer.mlp_norm, net.hidden, net.eps, b.normed, num_rows);
    product(layer.gate_up, {b.normed, num_rows, net.hidden, b.inner, net.inner, false, Then::SWIGLU, nullptr});
    product(layer.down, {b.inner, num_rows, net.inner, b.x, net.hidden, false, Then::ADD, b.x});
}

}  // namespace

bool forward(const Network& net, const Rows& rows, const Buffers& b, int num_threads) {
    for (int64_t row = 0; row < rows.num_rows; ++row)
        if (b.ids[row] < 0 || b.ids[row] >= net.num_ids) return false;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
    {
        const Share mine(rows.num_rows);
        for (int64_t row = mine.first; row < mine.last; ++row)  // the first norm has the same shares
            std::memcpy(b.x + row * net.hidden, net.embedding + b.ids[row] * net.hidden, net.hidden * sizeof(bf16));
        for (int64_t n = 0; n < net.num_layers; ++n) layer_forward(net, net.layers[n], rows, b, next);
        for (int64_t row = mine.first; row < mine.last; ++row)
            norm_row(b.x + row * net.hidden, net.norm, net.hidden, net.eps, b.normed + row * net.hidden);
    }
    return true;
}

}  // namespace KIND
