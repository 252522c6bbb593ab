#include "recurrence.h"

#include <algorithm>
#include <vector>

#include "team.h"

namespace KIND {

namespace {

int64_t up(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// The state of one head, and its rows of one row, with their last dimension padded by zeros to whole vectors.
struct Head {
    const Recurrence& r;
    int64_t head, rows, width, padded;  // the state is [rows, width], in memory [rows, padded]
    std::vector<float> now, aside, first, second, made, padded_rates;
    const float* rates = nullptr;  // of this head, [rows, padded]

    Head(const Recurrence& r, int64_t head) : r(r), head(head) {
        rows = r.rule == Rule::DELTA ? r.deep : r.wide;
        width = r.rule == Rule::DELTA ? r.wide : r.deep;
        padded = up(width);
        now.assign(rows * padded, 0.0f);
        aside.resize(rows * padded);
        first.assign(padded, 0.0f);
        second.assign(padded, 0.0f);
        made.assign(padded, 0.0f);
        if (r.rule != Rule::CHANNELS) return;
        rates = r.rates + head * rows * width;
        if (padded == width) return;
        padded_rates.assign(rows * padded, 0.0f);
        for (int64_t i = 0; i < rows; ++i)
            std::copy(rates + i * width, rates + (i + 1) * width, &padded_rates[i * padded]);
        rates = padded_rates.data();
    }

    float* kept(int64_t slot, int64_t version) const {
        return r.state + ((slot * 2 + version) * r.heads + head) * rows * width;
    }

    void read(const float* from) {
        for (int64_t i = 0; i < rows; ++i) std::copy(from + i * width, from + (i + 1) * width, &now[i * padded]);
    }

    void write(float* to) const {
        for (int64_t i = 0; i < rows; ++i) std::copy(&now[i * padded], &now[i * padded] + width, to + i * width);
    }

    // Advances a state by a row; writes the row's output [wide] to `out`, unless that is null.
    void advance(float* state, int64_t row, float* out) {
        const int64_t shared = head / (r.heads / r.groups);
        const float* key = r.keys + (row * r.groups + shared) * r.deep;
        const float* vector = r.vectors + (row * r.groups + shared) * r.deep;
        const float* value = r.values + (row * r.heads + head) * r.wide;
        if (r.rule == Rule::CHANNELS)
            return channels(state, vector, key, value, r.gates + (row * r.heads + head) * r.wide, out);
        const float decay = r.gates[(row * 2) * r.heads + head], strength = r.gates[(row * 2 + 1) * r.heads + head];
        if (r.rule == Rule::DELTA)
            delta(state, vector, key, value, decay, strength, out);
        else
            scan(state, vector, key, value, decay, strength, out);
    }

    // S ← decay·S;  S ← S + k ⊗ β·(v − S·k);  out = S·q;  S [deep, wide]
    void delta(float* state, const float* q, const float* k, const float* v, float decay, float beta, float* out) {
        std::copy(v, v + width, first.begin());
        int64_t e = 0;
        for (; e + 4 * LANES <= padded; e += 4 * LANES) columns<4>(state, q, k, decay, beta, e);
        for (; e < padded; e += LANES) columns<1>(state, q, k, decay, beta, e);
        if (out) std::copy(made.begin(), made.begin() + width, out);
    }

    template <int COUNT>
    void columns(float* state, const float* q, const float* k, float decay, float beta, int64_t e) {
        Lanes sum[COUNT], change[COUNT];
        for (int n = 0; n < COUNT; ++n) sum[n] = zeros();
        for (int64_t d = 0; d < rows; ++d)
            for (int n = 0; n < COUNT; ++n) {
                float* place = state + d * padded + e + n * LANES;
                const Lanes faded = mul(same(decay), load(place));
                store(place, faded);
                sum[n] = fma(same(k[d]), faded, sum[n]);
            }
        for (int n = 0; n < COUNT; ++n) {
            change[n] = mul(same(beta), sub(load(&first[e + n * LANES]), sum[n]));
            sum[n] = zeros();
        }
        for (int64_t d = 0; d < rows; ++d)
            for (int n = 0; n < COUNT; ++n) {
                float* place = state + d * padded + e + n * LANES;
                const Lanes grown = fma(same(k[d]), change[n], load(place));
                store(place, grown);
                sum[n] = fma(same(q[d]), grown, sum[n]);
            }
        for (int n = 0; n < COUNT; ++n) store(&made[e + n * LANES], sum[n]);
    }

    // S ← decay·S + (Δ·x) ⊗ b;  out = S·c;  S [wide, deep]
    void scan(float* state, const float* c, const float* b, const float* x, float decay, float step, float* out) {
        std::copy(b, b + width, first.begin());
        std::copy(c, c + width, second.begin());
        for (int64_t p = 0; p < rows; ++p) {
            const float into = step * x[p];
            Lanes sum = zeros();
            for (int64_t n = 0; n < padded; n += LANES) {
                float* place = state + p * padded + n;
                const Lanes grown = fma(same(into), load(&first[n]), mul(same(decay), load(place)));
                store(place, grown);
                sum = fma(load(&second[n]), grown, sum);
            }
            if (out) out[p] = total(sum);
        }
    }

    // S ← exp(Δ·A)·S + (Δ·x) ⊗ b, each channel with a Δ of its own;  out = S·c;  S [wide, deep]
    void channels(float* state, const float* c, const float* b, const float* x, const float* steps, float* out) {
        std::copy(b, b + width, first.begin());
        std::copy(c, c + width, second.begin());
        for (int64_t p = 0; p < rows; ++p) {
            const Lanes step = same(steps[p]), into = same(steps[p] * x[p]);
            Lanes sum = zeros();
            for (int64_t n = 0; n < padded; n += LANES) {
                float* place = state + p * padded + n;
                const Lanes decay = exp(mul(step, load(rates + p * padded + n)));
                const Lanes grown = fma(into, load(&first[n]), mul(decay, load(place)));
                store(place, grown);
                sum = fma(load(&second[n]), grown, sum);
            }
            if (out) out[p] = total(sum);
        }
    }

    float* out_of(int64_t row) const { return r.out + ((row - r.num_replayed) * r.heads + head) * r.wide; }

    void run(const StateRun& run) {
        if (run.read < 0)
            std::fill(now.begin(), now.end(), 0.0f);
        else
            read(kept(run.slot, run.read));
        for (int64_t n = 0; n < run.num_replayed; ++n) advance(now.data(), run.replayed + n, nullptr);
        const StateGroup* group = r.mask_groups + run.group;
        const StateGroup* end = group + run.num_groups;
        for (int64_t count = 1; count <= run.num_chain; ++count) {
            const int64_t row = run.chain + count - 1;
            advance(now.data(), row, out_of(row));
            if (count == run.num_final) write(kept(run.slot, run.written));
            for (; group < end && group->behind == count; ++group) {
                std::copy(now.begin(), now.end(), aside.begin());
                for (int64_t row = group->first; row < group->first + group->count; ++row)
                    advance(aside.data(), row, out_of(row));
            }
        }
    }
};

}  // namespace

void recur(const Recurrence& r, int num_threads) {
    share_out(num_threads, r.num_runs * r.heads, [&](int64_t first, int64_t last, bool) {
        for (int64_t unit = first; unit < last; ++unit) Head(r, unit % r.heads).run(r.runs[unit / r.heads]);
    });
}

}  // namespace KIND
