#include "draft.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "network.h"
#include "team.h"

namespace KIND {

namespace {

// Dot product of two rows by pairs, in sixteen sums that are added in a fixed order; width even.
float dot_rows(const bf16* a, const bf16* b, int64_t width) {
    Lanes sum = zeros();
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) sum = dot(sum, pairs(a + i), pairs(b + i));
    float rest = 0.0f;
    for (; i < width; ++i) rest += widen(a[i]) * widen(b[i]);
    return total(sum) + rest;
}

// Writes the input of W1 for one sequence: [h ; s·e(previous)], or without `row` the latter alone.
void look_at(const Table& table, float scale, const bf16* row, int64_t previous, bf16* out) {
    const int64_t hidden = table.width;
    if (row) {
        std::memcpy(out, row, hidden * sizeof(bf16));
        out += hidden;
    }
    const bf16* embedding = row_of(table, previous, out);
    for (int64_t i = 0; i < hidden; ++i) out[i] = round(scale * widen(embedding[i]));
}

void activate(bf16* x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, silu(load(x + i)));
    for (; i < count; ++i) x[i] = round(widen(x[i]) / (1.0f + std::exp(-widen(x[i]))));
}

// Writes -INFINITY over the values that truncation drops; the likeliest stays.
void truncate(std::vector<float>& values, int64_t top_k, double top_p, double min_p) {
    static thread_local std::vector<int64_t> order;
    static thread_local std::vector<double> weights;
    order.resize(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    const float best = values[order[0]];
    if (best == -INFINITY) return;
    const int64_t most = std::min<int64_t>(top_k, order.size());
    weights.resize(most);
    double sum = 0.0, before = 0.0;
    for (int64_t rank = 0; rank < most; ++rank)
        sum += weights[rank] = std::exp(double(values[order[rank]]) - double(best));
    for (int64_t rank = 0; rank < int64_t(order.size()); ++rank) {
        const bool kept = rank < most && (before < top_p * sum || top_p >= 1.0) && weights[rank] >= min_p;
        if (rank < most) before += weights[rank];
        if (rank && !kept) values[order[rank]] = -INFINITY;
    }
}

int64_t best(const DraftHead& head, const Drafts& d, int64_t sequence, int64_t mask, const bf16* row) {
    static thread_local std::vector<bf16> room;
    static thread_local std::vector<float> values;
    if (int64_t(room.size()) < head.hidden) room.resize(head.hidden);
    values.resize(d.candidates);
    const int64_t first = (sequence * d.masks + mask) * d.candidates;
    const float divisor = d.divisor ? d.divisor[sequence] : 1.0f;
    for (int64_t m = 0; m < d.candidates; ++m) {
        const bf16* output = row_of(head.output, d.ids[first + m], room.data());
        values[m] = (dot_rows(row, output, head.hidden) + d.offsets[first + m]) / divisor;
    }
    if (d.top_k) truncate(values, d.top_k[sequence], d.top_p[sequence], d.min_p[sequence]);
    int64_t chosen = d.ids[first];
    float greatest = -INFINITY;
    for (int64_t m = 0; m < d.candidates; ++m) {
        const float value = d.noise ? values[m] + d.noise[first + m] : values[m];
        if (value > greatest) greatest = value, chosen = d.ids[first + m];  // ties: the lower id
    }
    return chosen;
}

}  // namespace

void draft(const DraftHead& head, const Drafts& d, int num_threads) {
    const int64_t hidden = head.hidden, width = head.w1.inputs, inner = head.w1.outputs;
    std::vector<bf16> seen(d.sequences * width), between(d.sequences * inner), rescored(d.sequences * hidden);
    auto each = [&](auto work) {
        share_out(num_threads, d.sequences, [&](int64_t first, int64_t last, bool) {
            for (int64_t s = first; s < last; ++s) work(s);
        });
    };
    for (int64_t k = 0; k < d.masks; ++k) {
        each([&](int64_t s) {
            const int64_t previous = k ? d.chosen[s * d.masks + k - 1] : d.bonus[s];
            const bf16* row = d.rows + (s * d.masks + k) * hidden;
            look_at(head.embedding, head.scale, head.low_rank ? nullptr : row, previous, seen.data() + s * width);
            std::memcpy(rescored.data() + s * hidden, row, hidden * sizeof(bf16));
        });
        multiply(head.w1, {seen.data(), d.sequences, width, between.data(), inner, false, Then::NOTHING, nullptr},
                 num_threads);
        if (!head.low_rank) each([&](int64_t s) { activate(between.data() + s * inner, inner); });
        multiply(head.w2,
                 {between.data(), d.sequences, inner, rescored.data(), hidden, false, Then::ADD, rescored.data()},
                 num_threads);
        each([&](int64_t s) { d.chosen[s * d.masks + k] = best(head, d, s, k, rescored.data() + s * hidden); });
    }
}

void draft(const RecurrentHead& head, const RecurrentDrafts& d, int num_threads) {
    const int64_t hidden = head.hidden, width = head.w1.inputs, inner = head.w1.outputs;
    std::vector<bf16> seen(d.sequences * width), between(d.sequences * inner);
    const Matmul up = {seen.data(), d.sequences, width, between.data(), inner, false, Then::NOTHING, nullptr};
    const Matmul down = {between.data(), d.sequences, inner, d.states, hidden, false, Then::ADD, d.states};
    const Matmul out = {d.states, d.sequences, hidden, d.logits, d.stride, true, Then::NOTHING, nullptr};
    for (int64_t k = 0; k < d.drafts; ++k) {
        for (int64_t s = 0; s < d.sequences; ++s) {
            const int64_t previous = k ? d.chosen[s * d.drafts + k - 1] : d.previous[s];
            look_at(head.embedding, head.scale, d.states + s * hidden, previous, seen.data() + s * width);
        }
        multiply(head.w1, up, num_threads);
        activate(between.data(), d.sequences * inner);
        multiply(head.w2, down, num_threads);
        multiply(head.output, out, num_threads);
        for (int64_t s = 0; s < d.sequences; ++s) {
            const float* logits = d.logits + s * d.stride;
            const int64_t best = std::max_element(logits, logits + head.num_ids) - logits;  // ties: the lower id
            d.chosen[s * d.drafts + k] = head.ids ? head.ids[best] : best;
        }
    }
}

}  // namespace KIND
