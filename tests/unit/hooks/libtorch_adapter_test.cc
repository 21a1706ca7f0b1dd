// What a torch::nn::Module becomes on its way into the store.
#include "trainer_hooks/cpp/libtorch_adapter.h"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstring>

#include "tests/unit/thrift/rpc_world.h"
#include "thrift/remote_source.h"

namespace stockpot {
namespace {

class Net : public torch::nn::Module {
 public:
  Net() {
    plain = register_parameter("plain_weight", torch::randn({3, 5}));
    strided = register_parameter("strided_weight", torch::randn({7, 4}).t());
    half = register_parameter("half_weight", torch::randn({6}).to(torch::kBFloat16));
    tied = register_parameter("tied_weight", plain);
    view = register_parameter("view_weight", plain.detach().narrow(0, 1, 2));
    counter = register_buffer("counter", torch::tensor({int64_t{42}}));
    flags = register_buffer("flags", torch::tensor({true, false, true}));
    scalar = register_buffer("scalar", torch::tensor(1.5));
    none = register_buffer("none", torch::empty({0, 3}));
  }
  torch::Tensor plain, strided, half, tied, view, counter, flags, scalar, none;
};

const TensorView* Find(const TorchTensors& tensors, const std::string& name) {
  for (const TensorView& view : tensors.views) {
    if (view.name == name) return &view;
  }
  return nullptr;
}

std::vector<std::byte> BytesOf(const torch::Tensor& tensor) {
  const torch::Tensor contiguous = tensor.detach().contiguous();
  std::vector<std::byte> bytes(contiguous.nbytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), contiguous.const_data_ptr(), bytes.size());
  return bytes;
}

TEST(LibtorchAdapter, KeepsDtypesShapesAndTies) {
  const Net net;
  const auto tensors = CollectTensors(net);
  ASSERT_OK(tensors);
  EXPECT_EQ(tensors->views.size(), 9u);
  EXPECT_EQ(Find(*tensors, "plain_weight")->data, net.plain.const_data_ptr()) << "no copy";
  EXPECT_EQ(Find(*tensors, "tied_weight")->alias_of, "plain_weight");
  EXPECT_EQ(Find(*tensors, "view_weight")->alias_of, "") << "a part of it is no tie";
  EXPECT_EQ(Find(*tensors, "half_weight")->dtype, DType::kBF16);
  EXPECT_EQ(Find(*tensors, "counter")->dtype, DType::kI64);
  EXPECT_EQ(Find(*tensors, "flags")->dtype, DType::kBool);
  EXPECT_EQ(Find(*tensors, "strided_weight")->shape, (std::vector<int64_t>{4, 7}));
  EXPECT_TRUE(Find(*tensors, "scalar")->shape.empty());
}

TEST(LibtorchAdapter, RefusesWhatHasNoName) {
  torch::nn::Module module;
  module.register_buffer("phases", torch::zeros({2}, torch::kComplexFloat));
  const Status status = CollectTensors(module).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("phases"), std::string::npos) << status.ToString();
}

TEST(LibtorchAdapter, StoresLogicalContents) {
  RpcWorld world;
  std::mt19937_64 random(TestSeed());
  const auto client = world.NewClient();
  UploadBase(*client, "tiny", TinyLlama(random));
  CheckpointHookOptions options;
  options.address = world.unix_socket();
  options.run = "net";
  options.base = "tiny";
  options.run_config = {.publish = PublishPolicy::kOnRequest};
  const auto hook = CheckpointHook::Create(options);
  ASSERT_OK(hook);
  const Net net;
  {
    const auto tensors = CollectTensors(net);
    ASSERT_OK(tensors);
    ASSERT_TRUE((*hook)->OnStep(3, tensors->views, {}));
  }
  ASSERT_TRUE((*hook)->Flush(60'000));
  ASSERT_EQ((*hook)->Stats().committed, 1) << (*hook)->Stats().last_error.ToString();
  const auto source = OpenRemoteArtifact(*client, "net@3");
  ASSERT_OK(source);
  for (const auto& [name, tensor] :
       {std::pair<std::string, torch::Tensor>{"plain_weight", net.plain},
        {"strided_weight", net.strided},
        {"half_weight", net.half},
        {"tied_weight", net.plain},
        {"view_weight", net.view},
        {"counter", net.counter},
        {"flags", net.flags},
        {"scalar", net.scalar},
        {"none", net.none}}) {
    const auto bytes = (*source)->ReadAll(name);
    ASSERT_OK(bytes);
    EXPECT_EQ(*bytes, BytesOf(tensor)) << name;
  }
  EXPECT_EQ((*source)->Find("tied_weight")->alias_of, "plain_weight");
}

// One step of an optimizer, then what it keeps, beside values that the C++ API of LibTorch gives.
TEST(LibtorchAdapter, CollectsWhatOptimizersKeep) {
  torch::nn::Linear module(5, 3);
  const auto step = [&](torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    module->forward(torch::ones({2, 5})).sum().backward();
    optimizer.step();
  };
  const auto collect = [&](const torch::optim::Optimizer& optimizer) {
    TorchTensors tensors;
    EXPECT_OK(AddOptimizer(optimizer, *module, "optimizer", tensors));
    for (const TensorView& view : tensors.views) EXPECT_EQ(view.group, "optimizer");
    return tensors;
  };
  torch::optim::AdamW adam(module->parameters(), torch::optim::AdamWOptions(1e-3));
  EXPECT_TRUE(collect(adam).views.empty()) << "before its first step";
  step(adam);
  step(adam);
  const TorchTensors moments = collect(adam);
  EXPECT_EQ(moments.views.size(), 6u);
  const auto& state = static_cast<const torch::optim::AdamWParamState&>(
      *adam.state().at(module->weight.unsafeGetTensorImpl()));
  const TensorView* average = Find(moments, "optimizer/weight/exp_avg");
  ASSERT_NE(average, nullptr);
  EXPECT_EQ(average->data, state.exp_avg().const_data_ptr()) << "no copy";
  EXPECT_EQ(Find(moments, "optimizer/weight/exp_avg_sq")->shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(*static_cast<const int64_t*>(Find(moments, "optimizer/bias/step")->data), 2);

  torch::optim::SGD sgd(module->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  step(sgd);
  EXPECT_NE(Find(collect(sgd), "optimizer/bias/momentum_buffer"), nullptr);

  TorchTensors refused;
  const torch::nn::Linear other(5, 3);
  EXPECT_EQ(AddOptimizer(adam, *other, "optimizer", refused).code(), StatusCode::kInvalidArgument);
  torch::optim::RMSprop unknown(module->parameters(), torch::optim::RMSpropOptions(0.1));
  step(unknown);
  const Status status = AddOptimizer(unknown, *module, "optimizer", refused);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("AddTensors"), std::string::npos) << status.ToString();
}

TEST(LibtorchAdapter, AnyTensorsMakeAGroup) {
  TorchTensors tensors;
  const torch::Tensor strided = torch::arange(6).view({2, 3}).t();
  ASSERT_OK(AddTensors({{"loader/order", strided}, {"loader/same", strided}}, "loader", tensors));
  ASSERT_EQ(tensors.views.size(), 2u);
  EXPECT_EQ(tensors.views[0].group, "loader");
  EXPECT_EQ(tensors.views[1].alias_of, "") << "a tensor of its own";
  EXPECT_EQ(tensors.views[0].shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(static_cast<const int64_t*>(tensors.views[0].data)[1], 3) << "its logical content";
  EXPECT_EQ(
      AddTensors({{"phases", torch::zeros({2}, torch::kComplexFloat)}}, "loader", tensors).code(),
      StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stockpot
