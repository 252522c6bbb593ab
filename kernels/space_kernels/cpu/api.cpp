// What Python calls: one set of functions for each kind of processor, named by it.

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "draft.h"
#include "export.h"
#include "network.h"

using namespace KIND;

extern "C" {

void EXPORT(pack)(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    pack(weight, outputs, inputs, panels);
}

void EXPORT(pack8)(const int8_t* weight, int64_t outputs, int64_t inputs, Code* panels) {
    pack(weight, outputs, inputs, panels);
}

void EXPORT(linear)(const Linear* weight, const Product* product, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        const Share panels(weight->panels, TOGETHER);
        multiply(*weight, *product, panels.first, panels.last);
    }
}

void EXPORT(norm)(const bf16* x, const bf16* weight, int64_t num_rows, int64_t width, float eps, bf16* out,
                  int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        const Share rows(num_rows);
        for (int64_t row = rows.first; row < rows.last; ++row)
            norm_row(x + row * width, weight, width, eps, out + row * width);
    }
}

// Heads are normed, turned and stored as a layer of `forward` does it; `cos` null: only stored.
void EXPORT(store)(const Rows* rows, const Heads* heads, const Attention* a, const bf16* query_norm,
                   const bf16* key_norm, float eps, const float* cos, const float* sin, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    turn_and_store(*rows, *heads, *a, query_norm, key_norm, eps, cos, sin);
}

void EXPORT(attend)(const Rows* rows, const Heads* heads, const Attention* a, int num_threads) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
    for (int64_t item; (item = next.fetch_add(1)) < rows->num_tiles * heads->kv;) attend(*rows, *heads, *a, item);
}

bool EXPORT(forward)(const Network* network, const Rows* rows, const Buffers* buffers, int num_threads) {
    return forward(*network, *rows, *buffers, num_threads);
}

void EXPORT(draft)(const DraftHead* head, const Drafts* drafts, int num_threads) {
    draft(*head, *drafts, num_threads);
}
}
