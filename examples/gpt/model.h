#pragma once

// A decoder-only transformer in ordinary libtorch: nothing here knows of meshes.
#include <torch/torch.h>

struct GptOptions {
  std::int64_t vocabulary = 256;
  std::int64_t context = 64;  // the longest sequence
  std::int64_t width = 64;
  std::int64_t heads = 4;
  std::int64_t layers = 2;
  double dropout = 0;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options) : heads(options.heads) {
    const std::int64_t width = options.width;
    const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    wq = linear("wq", width, width);
    wk = linear("wk", width, width);
    wv = linear("wv", width, width);
    wo = linear("wo", width, width);
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = linear("up", width, 4 * width);
    down = linear("down", 4 * width, width);
    dropout = register_module("dropout", torch::nn::Dropout(options.dropout));
  }

  at::Tensor attention(const at::Tensor& x, const at::Tensor& future) {
    const auto split = [&](const at::Tensor& y) {  // [batch, time, width] -> [batch, heads, time, width / heads]
      return y.reshape({y.size(0), y.size(1), heads, y.size(2) / heads}).transpose(1, 2);
    };
    const at::Tensor q = split(wq(x)), k = split(wk(x)), v = split(wv(x));
    const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
    const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * scale;
    const at::Tensor weights = at::softmax(scores + future, -1);
    const at::Tensor y = at::matmul(weights, v).transpose(1, 2);
    return wo(y.reshape({y.size(0), y.size(1), y.size(2) * y.size(3)}));
  }

  at::Tensor forward(at::Tensor x, const at::Tensor& future) {
    x = x + dropout(attention(norm1(x), future));
    return x + dropout(down(torch::gelu(up(norm2(x)))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
    positions = register_parameter("positions", torch::randn({options.context, options.width}) * 0.02);
    future = register_buffer("future", torch::full({options.context, options.context}, -1e9).triu(1));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    head = register_module("head",
                           torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  }

  // [batch, time] -> [batch, time, vocabulary]
  at::Tensor forward(const at::Tensor& text) {
    const std::int64_t time = text.size(1);
    at::Tensor x = tokens(text) + positions.narrow(0, 0, time);
    const at::Tensor mask = future.narrow(0, 0, time).narrow(1, 0, time);
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x, mask);
    return head(norm(x));
  }

  at::Tensor loss(const at::Tensor& text, const at::Tensor& next) {
    const at::Tensor logits = forward(text);
    return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(2)}), next.reshape({-1}));
  }

  torch::nn::Embedding tokens{nullptr};
  at::Tensor positions, future;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);
