// Reads a model and rows of tokens from a file and writes the logits of all of them: the library for another processor,
// run in an emulator. Pointers in the file are addresses in the process that wrote it; each is followed by its bytes.
#include <cstdio>
#include <map>
#include <vector>

#include "read.cpp"

static std::map<const void*, std::vector<char>> tensors;

template <typename T>
static void move(T*& pointer) {
  if (pointer) pointer = reinterpret_cast<T*>(tensors.at(pointer).data());
}
static void move(Matrix& matrix) { move(matrix.values), move(matrix.scale), move(matrix.bias); }
static void move(Norm& norm) { move(norm.weight), move(norm.bias); }

template <typename T>
static std::vector<T> take(FILE* file, size_t count) {
  std::vector<T> found(count);
  if (std::fread(found.data(), sizeof(T), count, file) != count) std::abort();
  return found;
}

int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  Model model = take<Model>(file, 1)[0];
  std::vector<Layer> layers = take<Layer>(file, model.num_layers);
  const std::vector<int64_t> sizes = take<int64_t>(file, 4);
  const int64_t rows = sizes[0], length = sizes[1], chunk = sizes[2];
  const std::vector<int64_t> tokens = take<int64_t>(file, rows * length);
  for (int64_t i = 0; i < sizes[3]; ++i) {
    const std::vector<int64_t> place = take<int64_t>(file, 2);
    tensors[reinterpret_cast<const void*>(place[0])] = take<char>(file, place[1]);
  }
  for (Layer& layer : layers) {
    for (Norm* norm : {&layer.ln1, &layer.ln2, &layer.q_norm, &layer.k_norm}) move(*norm);
    for (Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate, &layer.up, &layer.down}) move(*matrix);
  }
  model.layers = layers.data();
  move(model.embedding), move(model.head), move(model.positions), move(model.turns), move(model.ln_f);

  const int64_t vocabulary = model.head.outputs;
  const size_t cache = model.num_layers * rows * model.num_kv_heads * length * model.head_size;
  std::vector<float> keys(cache), values(cache), logits(rows * length * vocabulary);
  for (int64_t first = 0; first < length; first += chunk) {
    const int64_t size = std::min(chunk, length - first);
    std::vector<int64_t> ids, slots, positions, wanted;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t position = first; position < first + size; ++position) {
        wanted.push_back(ids.size());
        ids.push_back(tokens[row * length + position]);
        slots.push_back(row);
        positions.push_back(position);
      }
    const int64_t count = ids.size();
    std::vector<float> found(count * vocabulary);
    Batch batch{ids.data(),    slots.data(), positions.data(), wanted.data(), keys.data(), values.data(),
                found.data(), nullptr,      count,            count,         rows,        length, 2};
    std::vector<char> work(gptworks_work_size(&model, &batch));
    batch.work = work.data();
    if (gptworks_read(&model, &batch) != -1) return 1;
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(&logits[(slots[i] * length + positions[i]) * vocabulary], &found[i * vocabulary],
                  vocabulary * sizeof(float));
  }
  std::fwrite(logits.data(), sizeof(float), logits.size(), stdout);
}
