// The functions that Python calls, one set per kind of processor, named after it.

#include "draft.h"
#include "experts.h"
#include "export.h"
#include "network.h"
#include "recurrence.h"
#include "table.h"
#include "team.h"
#include "train.h"

using namespace KIND;

extern "C" {

void EXPORT(pack)(const bf16* weight, int64_t outputs, int64_t inputs, bf16* panels) {
    pack(weight, outputs, inputs, panels);
}

void EXPORT(quantize)(const bf16* weight, int64_t outputs, int64_t inputs, int groups, const Quantized* to,
                      int num_threads) {
    share_out(num_threads, outputs, [&](int64_t first, int64_t last, bool) {
        quantize(weight, inputs, Groups(groups), *to, first, last);
    });
}

void EXPORT(pack_groups)(const GroupWeights* weight, int64_t outputs, int64_t inputs, int groups, uint8_t* panels) {
    pack(*weight, outputs, inputs, Groups(groups), panels);
}

int64_t EXPORT(panel_bytes)(int64_t inputs, int groups) { return panel_bytes(inputs, Groups(groups)); }

int64_t EXPORT(padded)(int64_t inputs) { return padded(inputs); }

void EXPORT(linear)(const Linear* weight, const Matmul* matmul, int num_threads) {
    multiply(*weight, *matmul, num_threads);
}

void EXPORT(linear_each)(const Linear* weights, const HeadRows* heads, int num_threads) {
    multiply_each(weights, *heads, num_threads);
}

// Writes these rows of the table to `to` [count, width].
void EXPORT(look_up)(const Table* table, const int64_t* rows, int64_t count, bf16* to) {
    for (int64_t n = 0; n < count; ++n) look_up(*table, rows[n], to + n * table->width);
}

void EXPORT(norm)(const bf16* x, const bf16* weight, int64_t num_rows, int64_t width, float eps, bf16* out,
                  int num_threads) {
    norm(x, weight, num_rows, width, eps, out, num_threads);
}

// Norms, rotates and stores heads as a layer of `forward` does; with `cos` null they are only stored.
void EXPORT(store)(const Rows* rows, const Heads* heads, const Attention* a, const bf16* query_norm,
                   const bf16* key_norm, float eps, const float* cos, const float* sin, int num_threads) {
    turn_and_store(*rows, *heads, *a, query_norm, key_norm, eps, cos, sin, num_threads);
}

void EXPORT(attend)(const Rows* rows, const Heads* heads, const Attention* a, int num_threads) {
    attend(*rows, *heads, *a, num_threads);
}

bool EXPORT(forward)(const Network* network, const Rows* rows, const Buffers* buffers, int num_threads) {
    return forward(*network, *rows, *buffers, num_threads);
}

int64_t EXPORT(forward_sampled)(const Network* network, const Rows* rows, const Buffers* buffers, const Linear* head,
                                const Logits* logits, const Sampling* sampling, const NextDrafts* next,
                                int64_t* ids, bool* valid, int num_threads) {
    return forward_sampled(*network, *rows, *buffers, *head, *logits, sampling, next, ids, valid, num_threads);
}

bool EXPORT(experts)(const Experts* weights, const ExpertRows* rows, int num_threads) {
    return experts(*weights, *rows, num_threads);
}

void EXPORT(draft)(const DraftHead* head, const Drafts* drafts, int num_threads) {
    draft(*head, *drafts, num_threads);
}

void EXPORT(draft_recurrent)(const RecurrentHead* head, const RecurrentDrafts* drafts, int num_threads) {
    draft(*head, *drafts, num_threads);
}

void EXPORT(recur)(const Recurrence* recurrence, int num_threads) { recur(*recurrence, num_threads); }

void EXPORT(distill)(const Distillation* loss, int num_threads) { distill(*loss, num_threads); }

void EXPORT(attention_backward)(bf16* scores, bf16* grad_weights, const float* logsumexp, int64_t rows, int64_t keys,
                                float scale, int num_threads) {
    attention_backward(scores, grad_weights, logsumexp, rows, keys, scale, num_threads);
}

void EXPORT(norm_backward)(const bf16* x, const bf16* weight, const bf16* grad_output, int64_t rows, int64_t width,
                           float eps, bf16* grad_x, int num_threads) {
    norm_backward(x, weight, grad_output, rows, width, eps, grad_x, num_threads);
}

void EXPORT(swiglu)(const bf16* gate, const bf16* up, int64_t count, bf16* out, int num_threads) {
    swiglu(gate, up, count, out, num_threads);
}

void EXPORT(swiglu_backward)(const bf16* gate, const bf16* up, const bf16* grad_output, int64_t count, bf16* grad_gate,
                             bf16* grad_up, int num_threads) {
    swiglu_backward(gate, up, grad_output, count, grad_gate, grad_up, num_threads);
}
}
