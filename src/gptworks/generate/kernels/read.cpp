// A batch of tokens through a GPT on a CPU, in one call: steps of many texts, pieces of prompts, drafts to be verified.
//
// Token i belongs to slot slots[i] of the cache and stands at positions[i] there; it writes its key and value and looks
// at positions 0 to its own. With few tokens the time is that of reading the weights from memory, with many that of
// multiplying. Nothing is allocated and nobody else is called. A plain C interface without headers of others, so that
// building takes seconds.
#include <omp.h>

#include "layers.h"

namespace {

int64_t round_up(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

bool is_whole(const Matrix& matrix) { return matrix.type == kInt8 || matrix.type == kInt4; }

// The memory between the layers. Its size is asked for before.
struct Work {
  float *x, *normed, *qkv, *mixed, *inner, *gates, *of_threads;
  char* packed;   // tokens in whole numbers
  int64_t* runs;  // [N + 1]: where each run of consecutive tokens of a slot, at most kTokens long, begins
  int64_t num_runs, per_thread, packed_floats, scores_floats;
  char* end;

  Work(const Model& model, const Batch& batch) {
    const int64_t n = batch.num_tokens, mixed_size = model.num_heads * model.head_size;
    const bool has_whole = is_whole(model.head) || is_whole(model.layers[0].qkv);
    const int64_t deepest = std::max({model.hidden, model.ffn, mixed_size});
    packed_floats = has_whole ? Packed::bytes_of_token(deepest) / 4 : 0;
    scores_floats = kTokens * round_up(batch.cache_len);
    x = static_cast<float*>(batch.work);
    normed = x + round_up(n * model.hidden);
    qkv = normed + round_up(n * model.hidden);
    mixed = qkv + round_up(n * model.layers[0].qkv.outputs);
    inner = mixed + round_up(n * mixed_size);
    gates = inner + round_up(n * model.ffn);
    float* at = gates + (model.layers[0].gate.values ? round_up(n * model.ffn) : 0);
    packed = reinterpret_cast<char*>(at);
    of_threads = at + n * packed_floats;
    per_thread = kBlock * kChunk + scores_floats + round_up(kFew * model.hidden) + kFew * packed_floats;
    runs = reinterpret_cast<int64_t*>(of_threads + batch.threads * per_thread);
    num_runs = 0;
    end = reinterpret_cast<char*>(runs + n + 1);
  }

  void find_runs(const Batch& batch) {
    for (int64_t i = 0; i < batch.num_tokens; ++i) {
      const bool goes_on = num_runs > 0 && i - runs[num_runs - 1] < kTokens && batch.slots[i] == batch.slots[i - 1] &&
                           batch.positions[i] == batch.positions[i - 1] + 1;
      if (!goes_on) runs[num_runs++] = i;
    }
    runs[num_runs] = batch.num_tokens;
  }
};

// The keys and values of one layer.
struct LayerCache {
  const Model& model;
  const Batch& batch;
  int64_t number;

  int64_t at(int64_t slot, int64_t head, int64_t position) const {
    const int64_t row = ((number * batch.num_slots + slot) * model.num_kv_heads + head) * batch.cache_len + position;
    return row * model.head_size;
  }
  int64_t shares() const { return model.num_heads / model.num_kv_heads; }  // heads that share a key and a value

  // Queries and keys are normalized and turned; the new keys and values join the old ones.
  void extend(float* qkv) const {
    const Layer& layer = model.layers[number];
    const int64_t size = model.head_size, heads = model.num_kv_heads;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch.num_tokens * heads; ++item) {  // token and head of keys and values
      const int64_t token = item / heads, position = batch.positions[token];
      float* queries = qkv + item * (shares() + 2) * size;
      float* key = queries + shares() * size;
      for (float* head = queries; head <= key; head += size) {
        const Norm& norm = head < key ? layer.q_norm : layer.k_norm;
        if (norm.weight) normalize(head, norm, head, size, model.eps, true);
        if (model.turns) turn(head, model.turns + position * size, size);
      }
      const int64_t to = at(batch.slots[token], item % heads, position);
      std::memcpy(batch.keys + to, key, size * sizeof(float));
      std::memcpy(batch.values + to, key + size, size * sizeof(float));
    }
  }

  void look_at(const Work& work, float* scores) const {
    const int64_t size = model.head_size, heads = model.num_heads, row = (heads + 2 * model.num_kv_heads) * size;
#pragma omp for schedule(dynamic)
    for (int64_t item = work.num_runs * heads - 1; item >= 0; --item) {  // run and head; the last take longest
      const int64_t head = item % heads, group = head / shares();
      const int64_t first = work.runs[item / heads], end = work.runs[item / heads + 1];
      const int64_t cached = at(batch.slots[first], group, 0);
      Look look;
      look.q = work.qkv + first * row + (head + 2 * group) * size;
      look.q_stride = row;
      look.keys = batch.keys + cached;
      look.values = batch.values + cached;
      look.scores = scores;
      look.stride = round_up(batch.cache_len);
      look.mixed = work.mixed + (first * heads + head) * size;
      look.mixed_stride = heads * size;
      look.window = model.window;
      look.first = model.window ? std::max<int64_t>(0, batch.positions[first] - model.window + 1) : 0;
      look.last = batch.positions[end - 1];
      look.size = size;
      with_constant<kTokens>(end - first, [&](auto T) { attend<T>(look); });
    }
  }
};

// What one thread has to itself, and how it takes part in a product.
struct Thread {
  const Work& work;
  float *widened, *scores, *normed;
  char* packed;
  bool is_apart;

  Thread(const Model& model, const Work& of) : work(of), is_apart(model.is_apart) {
    widened = work.of_threads + omp_get_thread_num() * work.per_thread;
    scores = widened + kBlock * kChunk;
    normed = scores + work.scores_floats;
    packed = reinterpret_cast<char*>(normed + round_up(kFew * model.hidden));
  }

  // The tokens in whole numbers. Few: every thread for itself.
  Packed packed_for(const Matrix& matrix, const float* x, int64_t tokens) const {
    const Packed to(tokens <= kFew ? packed : work.packed, tokens, matrix.depth);
    const auto one = [&](int64_t token) {
      pack(x + token * matrix.depth, matrix.depth, matrix.type == kInt4, to, token);
    };
    if (tokens <= kFew) {
      for (int64_t token = 0; token < tokens; ++token) one(token);
      return to;
    }
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; ++token) one(token);
    return to;
  }

  // Of few tokens the threads do not wait for each other at the end.
  void linear(const Matrix& matrix, const float* x, float* y, int64_t tokens, Then then = Then::kStore) const {
    const Product product{matrix, x, y, tokens, then, is_apart};
    if (is_whole(matrix)) multiply_whole(product, packed_for(matrix, x, tokens));
    else if (matrix.type == kBf16) multiply_floats<uint16_t>(product, widened);
    else multiply_floats<float>(product, widened);
  }
};

void wait(int64_t tokens) {
  if (tokens > kFew) return;  // they have waited
#pragma omp barrier
}

void read_layer(const Model& model, const Batch& batch, const Work& work, int64_t number, const Thread& thread) {
  const Layer& layer = model.layers[number];
  const LayerCache cache{model, batch, number};
  const int64_t n = batch.num_tokens;
  float* normed = n <= kFew ? thread.normed : work.normed;
  normalize_all(model, work.x, layer.ln1, normed, n);
  thread.linear(layer.qkv, normed, work.qkv, n);
  wait(n);
  cache.extend(work.qkv);
  cache.look_at(work, thread.scores);
  thread.linear(layer.out, work.mixed, work.x, n, Then::kAdd);
  wait(n);
  normalize_all(model, work.x, layer.ln2, normed, n);
  if (layer.gate.values) thread.linear(layer.gate, normed, work.gates, n);
  thread.linear(layer.up, normed, work.inner, n);
  activate_all(work.inner, layer.gate.values ? work.gates : nullptr, n, model.ffn, model.gelu);
  wait(n);
  thread.linear(layer.down, work.inner, work.x, n, Then::kAdd);
  wait(n);
}

void predict(const Model& model, const Batch& batch, const Work& work, const Thread& thread) {
  const int64_t wanted = batch.num_wanted;
  float* normed = wanted <= kFew ? thread.normed : work.normed;
  const auto one = [&](int64_t m) {
    normalize(work.x + batch.wanted[m] * model.hidden, model.ln_f, normed + m * model.hidden, model.hidden, model.eps,
              model.is_rms);
  };
  if (wanted <= kFew) {
    for (int64_t m = 0; m < wanted; ++m) one(m);
  } else {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < wanted; ++m) one(m);
  }
  thread.linear(model.head, normed, batch.logits, wanted);
}

// The place of the first token that cannot be read, or -1.
int64_t first_bad(const Model& model, const Batch& batch) {
  const auto within = [](int64_t value, int64_t end) { return 0 <= value && value < end; };
  for (int64_t i = 0; i < batch.num_tokens; ++i)
    if (!within(batch.tokens[i], model.embedding.outputs) || !within(batch.slots[i], batch.num_slots) ||
        !within(batch.positions[i], std::min(batch.cache_len, model.max_positions)))
      return i;
  return -1;
}

}  // namespace

extern "C" {

const char* gptworks_instructions() { return kInstructions; }

int64_t gptworks_work_size(const Model* model, const Batch* batch) {
  const Work work(*model, *batch);
  return work.end - static_cast<char*>(batch->work);
}

int64_t gptworks_read(const Model* of, const Batch* with) {
  const Model& model = *of;
  const Batch& batch = *with;
  if (const int64_t bad = first_bad(model, batch); bad >= 0) return bad;
  Work work(model, batch);
  work.find_runs(batch);
#pragma omp parallel num_threads(batch.threads)
  {
    const Thread thread(model, work);
    embed(model, batch, work.x);
    for (int64_t number = 0; number < model.num_layers; ++number) read_layer(model, batch, work, number, thread);
    if (batch.num_wanted) predict(model, batch, work, thread);
  }
  return -1;
}
}
