#include "network.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "team.h"

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

namespace {

// Minimum elements per thread: waking another thread costs more than processing fewer.
constexpr int64_t LEAST_NUMBERS = 16384;

// Processes rows of the given width, one by one.
template <typename Work>
void each_row(int num_threads, int64_t num_rows, int64_t width, const Work& work) {
    const int64_t unit = std::max<int64_t>(1, LEAST_NUMBERS / std::max<int64_t>(1, width));
    share_out(num_threads, (num_rows + unit - 1) / unit, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first * unit; row < std::min(num_rows, last * unit); ++row) work(row);
    });
}

}  // namespace

void multiply_low(const GatedRows& run, const Matmul& p, int num_threads) {
    const auto& [first_row, behind, delta, column, width] = run;
    bf16* to = p.low + first_row * p.low_stride + column;
    const Matmul low{p.x + first_row * p.x_stride, behind - first_row, p.x_stride, to, p.low_stride, false,
                     Then::NOTHING, nullptr, nullptr, 0, nullptr, 0};
    if (delta->a.groups != Groups::NONE) return multiply_by_groups(delta->a, low, num_threads);
    share_out(num_threads, delta->a.panels, [&, a = &delta->a](int64_t first, int64_t last, bool fresh) {
        multiply(*a, low, first, last, fresh);
    });
}

void multiply(const Linear& w, const Matmul& p, int num_threads) {
    constexpr int64_t TOGETHER = 4;  // minimum panels per thread
    if (w.groups != Groups::NONE) return multiply_by_groups(w, p, num_threads);
    for (int64_t n = 0; n < p.num_gated; ++n) multiply_low(p.gated[n], p, num_threads);
    share_out(num_threads, (w.panels + TOGETHER - 1) / TOGETHER, [&](int64_t first, int64_t last, bool fresh) {
        multiply(w, p, first * TOGETHER, std::min(w.panels, last * TOGETHER), fresh);
    });
}

void multiply_each(const Linear* weights, const HeadRows& p, int num_threads) {
    auto one = [&](int64_t head, int threads) {
        const Linear& w = weights[head];
        multiply(w, {p.x + head * p.x_head, p.rows, p.x_row, p.y + head * p.y_head, p.y_row, false, Then::NOTHING},
                 threads);
    };
    if (p.heads < num_threads) {
        for (int64_t head = 0; head < p.heads; ++head) one(head, num_threads);
        return;
    }
    share_out(num_threads, p.heads, [&](int64_t first, int64_t last, bool) {
        for (int64_t head = first; head < last; ++head) one(head, 1);
    });
}

void norm(const bf16* x, const bf16* weight, int64_t num_rows, int64_t width, float eps, bf16* out, int num_threads) {
    each_row(num_threads, num_rows, width,
             [&](int64_t row) { norm_row(x + row * width, weight, width, eps, out + row * width); });
}

void turn_and_store(const Rows& rows, const Heads& heads, const Attention& a, const bf16* query_norm,
                    const bf16* key_norm, float eps, const float* cos, const float* sin, int num_threads) {
    const int64_t half = heads.dim / 2, num_heads = heads.query + heads.kv;
    each_row(num_threads, rows.num_rows, (num_heads + heads.kv) * heads.dim, [&](int64_t row) {
        const int64_t position = rows.starts[rows.owner[row]] + rows.offsets[row];
        for (int64_t h = 0; cos && h < num_heads; ++h) {
            const bool is_query = h < heads.query;
            bf16* head = is_query ? a.query + row * a.query_stride + h * heads.dim
                                  : a.key + row * a.kv_stride + (h - heads.query) * heads.dim;
            const bf16* weight = is_query ? query_norm : key_norm;
            if (weight) norm_row(head, weight, heads.dim, eps, head);
            turn_head(head, cos + position * half, sin + position * half, heads.dim);
        }
        if (row < rows.num_chain_rows) store_rows(rows, heads, a, row, row + 1);
    });
}

void attend(const Rows& rows, const Heads& heads, const Attention& a, int num_threads) {
    constexpr int64_t LEAST_HEADS = 8;  // of a part: each lays out the keys for itself
    const int64_t whole = std::max<int64_t>(1, rows.num_tiles * heads.kv);
    const int64_t most = std::max<int64_t>(1, heads.query / heads.kv / LEAST_HEADS);
    const int64_t parts = std::clamp<int64_t>((2 * num_threads + whole - 1) / whole, 1, most);
    share_out(num_threads, rows.num_tiles * heads.kv * parts, [&](int64_t first, int64_t last, bool) {
        for (int64_t item = first; item < last; ++item) attend_item(rows, heads, a, item, parts);
    });
}

namespace {

void layer_forward(const Network& net, int64_t number, const Rows& rows, const Buffers& b, int num_threads) {
    const Layer& layer = net.layers[number];
    std::vector<GatedRows> gated(b.num_gated);
    auto matmul = [&](const Linear& linear, const Delta LayerDeltas::*delta, Matmul p) {
        for (int64_t n = 0; n < b.num_gated; ++n)
            gated[n] = {b.gated[n].first, b.gated[n].last, &(b.gated[n].layers[number].*delta), b.gated[n].column,
                        b.gated[n].width};
        p.gated = gated.data(), p.num_gated = b.num_gated, p.low = b.low, p.low_stride = b.low_stride;
        multiply(linear, p, num_threads);
    };
    const auto [num_query, num_kv, dim, value_dim] = net.heads;
    const int64_t num_rows = rows.num_rows, width = (num_query + 2 * num_kv) * dim, joined = num_query * dim;
    norm(b.x, layer.attention_norm, num_rows, net.hidden, net.eps, b.normed, num_threads);
    matmul(layer.query_key_value, &LayerDeltas::query_key_value,
           {b.normed, num_rows, net.hidden, b.fused, width, false, Then::NOTHING});

    const Attention a{b.fused, b.fused + joined, b.fused + joined + num_kv * dim, width, width, width, layer.key_pages,
                      layer.value_pages, net.block_size, b.attended, net.scale, 0.0f, layer.window};
    turn_and_store(rows, net.heads, a, layer.query_norm, layer.key_norm, net.eps, net.cos, net.sin, num_threads);
    attend(rows, net.heads, a, num_threads);

    matmul(layer.output, &LayerDeltas::output,
           {b.attended, num_rows, joined, b.x, net.hidden, false, Then::ADD, b.x});
    norm(b.x, layer.mlp_norm, num_rows, net.hidden, net.eps, b.normed, num_threads);
    matmul(layer.gate_up, &LayerDeltas::gate_up,
           {b.normed, num_rows, net.hidden, b.inner, net.inner, false, Then::SWIGLU});
    matmul(layer.down, &LayerDeltas::down, {b.inner, num_rows, net.inner, b.x, net.hidden, false, Then::ADD, b.x});
}

void tap(const Network& net, int64_t number, const Rows& rows, const Buffers& b) {
    for (int64_t place = 0; place < b.num_tapped; ++place) {
        if (b.tapped[place] != number) continue;
        for (int64_t row = 0; row < rows.num_chain_rows; ++row)
            std::memcpy(b.taps + (row * b.num_tapped + place) * net.hidden, b.x + row * net.hidden,
                        net.hidden * sizeof(bf16));
    }
}

}  // namespace

bool forward(const Network& net, const Rows& rows, const Buffers& b, int num_threads) {
    for (int64_t row = 0; row < rows.num_rows; ++row)
        if (b.ids[row] < 0 || b.ids[row] >= net.num_ids) return false;
    for (const GatedRun* run = b.gated; run != b.gated + b.num_gated; ++run)
        for (int64_t n = 0; run->masks && n < run->last - run->first; ++n)
            if (run->masks[n] < 0 || run->masks[n] >= run->num_masks) return false;
    each_row(num_threads, rows.num_rows, net.hidden, [&](int64_t row) {
        look_up(net.embedding, b.ids[row], b.x + row * net.hidden);
    });
    for (const GatedRun* run = b.gated; run != b.gated + b.num_gated; ++run)
        for (int64_t row = run->first; run->masks && row < run->last; ++row) {
            const bf16* embedding = run->embeddings + run->masks[row - run->first] * net.hidden;
            std::memcpy(b.x + row * net.hidden, embedding, net.hidden * sizeof(bf16));
        }
    for (int64_t n = 0; n < net.num_layers; ++n) {
        tap(net, n, rows, b);
        layer_forward(net, n, rows, b, num_threads);
    }
    tap(net, net.num_layers, rows, b);
    norm(b.x, net.norm, rows.num_rows, net.hidden, net.eps, b.normed, num_threads);
    return true;
}

namespace {

// The masks from which each sequence that goes on drafts: G sequences, K masks each; one with fewer repeats its last.
struct MasksInUse {
    std::vector<int64_t> sequences, positions, bonus, counts, rows;  // [G]; positions of the first drafts; rows [G, K]
    int64_t most = 0;                                                // K
    bool greedy = true;

    MasksInUse(const NextDrafts& next, const Rows& rows_of_step, const int64_t* drafted, const int64_t* sampled) {
        for (int64_t s = 0; s < next.sequences; ++s) {
            int64_t row = next.bounds[s];
            while (row + 1 < next.bounds[s + 1] && sampled[row] == drafted[row + 1]) ++row;
            next.num_drafts[s] = next.num_masks[row];
            if (!next.num_masks[row]) continue;
            sequences.push_back(s), bonus.push_back(sampled[row]), counts.push_back(next.num_masks[row]);
            positions.push_back(rows_of_step.starts[s] + row - next.bounds[s] + 2);
            firsts.push_back(next.masks[row]);
            greedy = greedy && !(next.sampling && next.sampling->sampled[s]);
            most = std::max(most, counts.back());
        }
        for (size_t g = 0; g < sequences.size(); ++g)
            for (int64_t k = 0; k < most; ++k) rows.push_back(firsts[g] + std::min(k, counts[g] - 1));
    }

   private:
    std::vector<int64_t> firsts;
};

void draft_next(const Network& net, const Rows& rows, const Buffers& b, const Linear& head, const Logits& logits,
                const NextDrafts& next, const int64_t* sampled, int num_threads) {
    const MasksInUse masks(next, rows, b.ids, sampled);
    const int64_t count = masks.rows.size(), K = masks.most;
    const int64_t M = masks.greedy ? next.greedy_candidates : next.candidates;
    if (!count) return;
    std::vector<bf16> hidden(count * net.hidden);
    for (int64_t n = 0; n < count; ++n)
        std::memcpy(hidden.data() + n * net.hidden, b.normed + masks.rows[n] * net.hidden, net.hidden * sizeof(bf16));
    std::vector<int64_t> ids(count * M), chosen(count);
    std::vector<float> offsets(count * M), noise, divisors;
    std::vector<int64_t> top_k;
    std::vector<double> top_p, min_p;
    Logits of_masks = logits;
    if (next.joined) {
        for (size_t g = 0; g < masks.counts.size(); ++g) {
            of_masks.values = logits.values + masks.rows[g * K] * logits.stride;
            of_masks.rows = masks.counts[g];
            best_of(of_masks, M, ids.data() + g * K * M, offsets.data() + g * K * M, num_threads);
            for (int64_t n = g * K + masks.counts[g]; n < int64_t(g + 1) * K; ++n) {
                std::copy_n(ids.data() + (n - 1) * M, M, ids.data() + n * M);
                std::copy_n(offsets.data() + (n - 1) * M, M, offsets.data() + n * M);
            }
        }
    } else {
        of_masks.values = logits.values + logits.rows * logits.stride;
        of_masks.rows = count;
        multiply(head, {hidden.data(), count, net.hidden, of_masks.values, logits.stride, true, Then::NOTHING},
                 num_threads);
        best_of(of_masks, M, ids.data(), offsets.data(), num_threads);
    }
    bool truncates = false;
    if (!masks.greedy) {
        const Sampling& by = *next.sampling;
        noise.resize(count * M);
        for (int64_t n = 0; n < count; ++n) {
            const int64_t s = masks.sequences[n / K];
            if (by.sampled[s])
                noise_of(by.keys[s], masks.positions[n / K] + n % K, ids.data() + n * M, M, noise.data() + n * M);
            if (n % K) continue;
            divisors.push_back(by.sampled[s] ? by.divisors[s] / next.sharpness : 1.0f);
            top_k.push_back(by.top_k[s] > 0 ? by.top_k[s] : M);
            top_p.push_back(by.top_p[s]), min_p.push_back(std::exp(by.log_min_p[s]));
            truncates = truncates || top_k.back() < M || top_p.back() < 1.0 || min_p.back() > 0.0;
        }
    }
    draft(*next.head,
          {count / K, K, M, hidden.data(), ids.data(), offsets.data(), masks.greedy ? nullptr : divisors.data(),
           masks.greedy ? nullptr : noise.data(), truncates ? top_k.data() : nullptr, top_p.data(), min_p.data(),
           masks.bonus.data(), chosen.data()},
          num_threads);
    for (size_t g = 0; g < masks.counts.size(); ++g)
        std::copy_n(chosen.data() + g * K, masks.counts[g], next.drafts + masks.sequences[g] * next.most);
}

}  // namespace

int64_t forward_sampled(const Network& net, const Rows& rows, const Buffers& b, const Linear& head,
                        const Logits& logits, const Sampling* sampling, const NextDrafts* next, int64_t* ids,
                        bool* valid, int num_threads) {
    if (!forward(net, rows, b, num_threads)) return -1;
    const int64_t num_rows = next && next->joined ? rows.num_rows : logits.rows;
    multiply(head, {b.normed, num_rows, net.hidden, logits.values, logits.stride, true, Then::NOTHING}, num_threads);
    if (sampling) sample(logits, *sampling, ids, valid, num_threads);
    else argmax(logits, ids, valid, num_threads);
    const int64_t num_valid = std::count(valid, valid + logits.rows, true);
    if (next && num_valid == logits.rows) draft_next(net, rows, b, head, logits, *next, ids, num_threads);
    return num_valid;
}

}  // namespace KIND
