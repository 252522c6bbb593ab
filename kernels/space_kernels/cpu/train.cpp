#include "train.h"

#include <algorithm>
#include <vector>

#include "team.h"

namespace KIND {

namespace {

constexpr int64_t PIECE = 1 << 14;  // numbers of an elementwise unit

float* scratch(int which, int64_t size) {
    static thread_local std::vector<float> buffers[2];
    if (int64_t(buffers[which].size()) < size) buffers[which].resize(size);
    return buffers[which].data();
}

// e^(scale·x - its maximum) of a row to `out`; returns the sum, and the maximum in `most`.
float exponentials(const bf16* row, int64_t count, float scale, float* out, float& most) {
    Lanes greatest_of = same(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) greatest_of = max(greatest_of, mul(same(scale), load(row + i)));
    most = greatest(greatest_of);
    Lanes sum = zeros();
    for (int64_t i = 0; i < count; i += LANES) {
        const Lanes e = exp(fma(same(scale), load(row + i), same(-most)));
        store(out + i, e);
        sum = add(sum, e);
    }
    return total(sum);
}

// 1 where a > b, else 0
Lanes above(Lanes a, Lanes b) { return min(max(mul(sub(a, b), same(1e38f)), zeros()), same(1.0f)); }

void distill_row(const Distillation& loss, int64_t number) {
    const int64_t V = loss.vocabulary;
    const bf16* teacher = loss.teacher + number * V;
    bf16* student = loss.student + number * V;
    float *p = scratch(0, V), *q = scratch(1, V), most_p, most_q;
    const float sum_p = exponentials(teacher, V, loss.scale, p, most_p);
    const float sum_q = exponentials(student, V, loss.scale, q, most_q);
    const Lanes to_p = same(1.0f / sum_p), to_q = same(1.0f / sum_q);
    Lanes overlap = zeros(), below = zeros(), dots = zeros();
    for (int64_t i = 0; i < V; i += LANES) {
        const Lanes a = mul(load(p + i), to_p), b = mul(load(q + i), to_q);
        overlap = add(overlap, min(a, b));
        below = fma(b, above(a, b), below);
        dots = fma(a, load(student + i), dots);
        store(p + i, a);
        store(q + i, b);
    }
    const float acceptance = total(overlap), cross = most_q + std::log(sum_q) - loss.scale * total(dots);
    loss.cross_entropy[number] = cross;
    loss.acceptance[number] = acceptance;
    if (!loss.needs_gradient) return;
    // Vector maxima lose NaN: what the sums show goes into every gradient.
    const Lanes entropy = same(loss.entropy + (cross - cross));
    const float factor = loss.rejection + (loss.surprisal ? loss.surprisal / std::max(acceptance, 1e-9f) : 0.0f);
    const Lanes rejection = same(factor), shared = same(factor * total(below));
    for (int64_t i = 0; i < V; i += LANES) {
        const Lanes a = load(p + i), b = load(q + i);
        Lanes grad = mul(entropy, sub(b, a));
        if (factor) grad = fma(b, sub(shared, mul(rejection, above(a, b))), grad);
        store(student + i, grad);
    }
}

// Sixteen numbers of a row, or the last ones and `fill`.
Lanes some(const bf16* row, int64_t left, bf16 fill) {
    if (left >= LANES) return load(row);
    bf16 rest[LANES];
    std::fill(std::copy(row, row + left, rest), rest + LANES, fill);
    return load(rest);
}
void put(bf16* row, int64_t left, Lanes a) {
    if (left >= LANES) return store(row, a);
    bf16 rest[LANES];
    store(rest, a);
    std::copy(rest, rest + left, row);
}

template <typename Work>
void each_piece(int64_t count, int num_threads, const Work& work) {
    share_out(num_threads, (count + PIECE - 1) / PIECE, [&](int64_t first, int64_t last, bool) {
        for (int64_t i = first * PIECE; i < std::min(count, last * PIECE); i += LANES) work(i);
    });
}

}  // namespace

void distill(const Distillation& loss, int num_threads) {
    share_out(num_threads, loss.rows, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first; row < last; ++row) distill_row(loss, row);
    });
}

void attention_backward(bf16* scores, bf16* grad_weights, const float* logsumexp, int64_t rows, int64_t keys,
                        float scale, int num_threads) {
    constexpr bf16 NEVER = 0xff80;  // -inf
    const int64_t at_once = std::max<int64_t>(1, PIECE / keys);
    share_out(num_threads, (rows + at_once - 1) / at_once, [&](int64_t first, int64_t last, bool) {
        float* weights = scratch(0, keys + LANES);
        for (int64_t row = first * at_once; row < std::min(rows, last * at_once); ++row) {
            bf16 *s = scores + row * keys, *grad = grad_weights + row * keys;
            const Lanes shift = same(-logsumexp[row]);
            Lanes sum = zeros();
            for (int64_t i = 0; i < keys; i += LANES) {
                const Lanes score = add(some(s + i, keys - i, NEVER), shift);
                const Lanes w = mul(exp(score), above(score, same(-80.0f)));  // no denormals, which are slow
                store(weights + i, w);
                put(s + i, keys - i, w);
                sum = fma(w, some(grad + i, keys - i, 0), sum);
            }
            const Lanes inner = same(total(sum));
            for (int64_t i = 0; i < keys; i += LANES) {
                const Lanes w = mul(load(weights + i), same(scale));
                put(grad + i, keys - i, mul(w, sub(some(grad + i, keys - i, 0), inner)));
            }
        }
    });
}

void norm_backward(const bf16* x, const bf16* weight, const bf16* grad_output, int64_t rows, int64_t width, float eps,
                   bf16* grad_x, int num_threads) {
    const int64_t at_once = std::max<int64_t>(1, PIECE / width);
    share_out(num_threads, (rows + at_once - 1) / at_once, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first * at_once; row < std::min(rows, last * at_once); ++row) {
            const bf16 *a = x + row * width, *grad = grad_output + row * width;
            Lanes squares = zeros(), dots = zeros();
            for (int64_t i = 0; i < width; i += LANES) {
                const Lanes v = load(a + i);
                squares = fma(v, v, squares);
                dots = fma(mul(load(weight + i), load(grad + i)), v, dots);
            }
            const float r = 1.0f / std::sqrt(total(squares) / float(width) + eps);
            const Lanes factor = same(r), back = same(-r * r * r * total(dots) / float(width));
            for (int64_t i = 0; i < width; i += LANES)
                store(grad_x + row * width + i,
                      fma(back, load(a + i), mul(factor, mul(load(weight + i), load(grad + i)))));
        }
    });
}

void swiglu(const bf16* gate, const bf16* up, int64_t count, bf16* out, int num_threads) {
    each_piece(count, num_threads,
               [&](int64_t i) { store(out + i, mul(silu(load(gate + i)), load(up + i))); });
}

void swiglu_backward(const bf16* gate, const bf16* up, const bf16* grad_output, int64_t count, bf16* grad_gate,
                     bf16* grad_up, int num_threads) {
    each_piece(count, num_threads, [&](int64_t i) {
        const Lanes g = load(gate + i), grad = load(grad_output + i), one = same(1.0f);
        const Lanes sigmoid = div(one, add(one, exp(sub(zeros(), g))));
        store(grad_up + i, mul(grad, mul(g, sigmoid)));
        const Lanes slope = mul(sigmoid, fma(g, sub(one, sigmoid), one));
        store(grad_gate + i, mul(mul(grad, load(up + i)), slope));
    });
}

}  // namespace KIND
