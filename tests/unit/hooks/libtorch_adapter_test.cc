// What a torch::nn::Module becomes on its way into the store.
#include "trainer_hooks/cpp/libtorch_adapter.h"

#include <torch/nn/modules/linear.h>

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
  options.run_config.publish = PublishPolicy::kOnRequest;
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

}  // namespace
}  // namespace stockpot
