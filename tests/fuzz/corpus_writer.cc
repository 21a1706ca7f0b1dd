// Writes the seeds of the fuzzers, from objects made by the code they test:
//   corpus_writer FOLDER       into FOLDER/TARGET/seed_NAME
// Seeds of another name in tests/fuzz/corpus come from long runs and from findings.
#include <cstdio>

#include "kernels/base/check.h"
#include "store/crc32c.h"
#include "store/manifest.h"
#include "store/pack_format.h"
#include "store/pool_records.h"
#include "store/record_codec.h"
#include "tests/fuzz/corpus.h"
#include "tests/fuzz/target.h"

namespace stockpot::fuzz {
namespace {

// --- manifests ---

Part PartOf(int64_t bytes) {
  Part part{.bytes = bytes};
  for (int64_t i = 0; i < ChunkCount(bytes); ++i) {
    part.chunks.push_back(Sha256(std::to_string(bytes + i)));
  }
  return part;
}

TensorEntry Raw(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  TensorEntry tensor{.name = name, .dtype = dtype, .shape = std::move(shape)};
  tensor.parts["data"] = PartOf(tensor.logical_bytes());
  return tensor;
}

Manifest BaseManifest() {
  Manifest manifest{.kind = ArtifactKind::kBase};
  manifest.tensors.push_back({.name = "lm_head.weight",
                              .dtype = DType::kBF16,
                              .shape = {40, 24},
                              .alias_of = "model.embed_tokens.weight"});
  manifest.tensors.push_back(Raw("model.embed_tokens.weight", DType::kBF16, {40, 24}));
  manifest.tensors.push_back(Raw("model.norm.weight", DType::kF32, {24}));
  manifest.tensors.push_back(Raw("scalar", DType::kI64, {}));
  manifest.tensors.push_back(Raw("two.chunks", DType::kU8, {kChunkBytes + 1}));
  manifest.tensors.push_back(Raw("zero", DType::kF16, {0, 3}));
  manifest.files["config.json"] = PartOf(704);
  return manifest;
}

Manifest VariantManifest() {
  Manifest manifest{.kind = ArtifactKind::kVariant, .base = Sha256("base")};
  manifest.run = "demo";
  manifest.step = 300;
  TensorEntry& kept = manifest.tensors.emplace_back();
  kept = {.name = "model.embed_tokens.weight", .dtype = DType::kBF16, .shape = {40, 24}};
  kept.codec = Codec::kBase;
  kept.content = Sha256("content");
  TensorEntry& packed = manifest.tensors.emplace_back();
  packed = {.name = "model.layers.0.w.weight", .dtype = DType::kBF16, .shape = {5, 12}};
  packed.codec = Codec::kBitDelta;
  packed.parts["signs"] = PartOf(10);
  packed.parts["alpha"] = PartOf(20);
  TensorEntry& planes = manifest.tensors.emplace_back();
  planes = {.name = "model.layers.1.w.weight", .dtype = DType::kF16, .shape = {5, 12}};
  planes.codec = Codec::kBitDelta;
  for (const char* plane : {"", "/1", "/2"}) {
    planes.parts[std::string("signs") + plane] = PartOf(10);
    planes.parts[std::string("alpha") + plane] = PartOf(20);
  }
  planes.parts["residual_a"] = PartOf(2 * 3 * 12);
  planes.parts["residual_b"] = PartOf(2 * 3 * 5);
  manifest.attributes = {{"codec", "bitdelta"}, {"tensor/w/error", "0.25 \" \\ \n \xc3\xa9"}};
  return manifest;
}

void AddManifests(const Corpus& corpus) {
  const Manifest base = BaseManifest(), variant = VariantManifest();
  corpus.Add("manifest", "base", base.ToJson());
  corpus.Add("manifest", "variant", variant.ToJson());
  Manifest checkpoint = base;
  checkpoint.kind = ArtifactKind::kCheckpoint;
  checkpoint.base = Sha256("base");
  checkpoint.run = "demo";
  checkpoint.step = 0;
  corpus.Add("manifest", "checkpoint", checkpoint.ToJson());
  checkpoint.kind = ArtifactKind::kMerge;
  checkpoint.attributes["kept_energy_min"] = "0.95";
  corpus.Add("manifest", "merge", checkpoint.ToJson());
  corpus.Add("manifest", "made", std::string("\x01\x00\x00\x04\x02\x01w\x03\x02\x03\x04", 11));
}

// --- packs ---

void AddPacks(const Corpus& corpus) {
  std::string file(kPackHeaderBytes, '\0');
  EncodePackHeader(7, std::as_writable_bytes(std::span(file)));
  const std::string chunk = "the bytes of a chunk";
  const ChunkLocation location{7, file.size(), static_cast<uint32_t>(chunk.size()),
                               Crc32c(AsBytes(chunk))};
  const auto header = EncodeRecordHeader(Sha256(chunk), location.length, location.crc);
  file.append(reinterpret_cast<const char*>(header.data()), header.size());
  file += chunk;
  const std::string digest(Sha256(chunk).raw());
  corpus.Add("pack", "file", std::string(1, '\0') + location.Encode() + digest + file);
  corpus.Add("pack", "damaged",
             std::string("\x01\x02\x05hello\x00\x03xyz\x03\x00\x01\x00\x10\x00\x00q", 22));
  corpus.Add("pack", "entry", "\x02" + location.Encode());
}

// --- records ---

void AddRecords(const Corpus& corpus) {
  const auto add = [&](char which, const std::string& name, const std::string& text) {
    corpus.Add("records", name, which + text);
  };
  const Digest digest = Sha256("artifact");
  add(0, "run", EncodeRun({.name = "demo", .base = digest, .tags = {{"owner", "me"}}}));
  add(1, "step",
      EncodeStep({.run = "demo", .step = 3, .artifact = digest, .metrics = {{"loss", 2.5}}}));
  add(2, "alias", EncodeAlias({.name = "name", .artifact = digest, .moved_by = "ingest"}));
  add(3, "event", EncodeEvent({.sequence = 1, .type = "alias", .fields = {{"to", "x"}}}));
  add(4, "job", EncodeJob({.key = "merge/demo/3", .args = {{"parents", "a,b"}}, .attempts = 1}));
  add(5, "eval", EncodeEval({.artifact = digest, .task = "mmlu", .metric = "acc", .value = 0.5}));
  add(6, "retention", EncodeRetention({.keep_last = 2, .best = {{"loss", true, 3}}, .every = 4}));
  add(7, "pin", EncodePin({.artifact = digest, .time_ms = 5, .by = "me", .why = "good"}));
  add(8, "tombstone", EncodeTombstone({.artifact = digest, .deleted_ms = 1, .purge_ms = 2}));
  const PoolConfig config{.base = digest, .budget_bytes = 1 << 20, .threshold = 0.5};
  add(9, "pool",
      EncodePool({.name = "phone",
                  .config = config,
                  .members = {{.artifact = digest, .owned = true, .state = {2, 1.5, 3.25}}},
                  .tasks = {{.name = "mail",
                             .member = digest,
                             .own = digest,
                             .texts = {{"t", "held out"}},
                             .own_loss = 2.5,
                             .loss = 2.75}},
                  .leaving = {{Sha256("left"), 100}},
                  .similarities = {0.25}}));
  add(10, "name", "demo-run_1.x");
  add(10, "name_utf8", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
}

// --- safetensors ---

std::string Safetensors(const std::string& header, size_t data_bytes) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(header.size() >> (8 * i));
  return out + header + std::string(data_bytes, 'd');
}

void AddSafetensors(const Corpus& corpus) {
  const std::string whole =
      Safetensors(R"({"__metadata__":{"format":"pt"},)"
                  R"("a":{"data_offsets":[0,24],"dtype":"F32","shape":[2,3]},)"
                  R"("b":{"data_offsets":[24,32],"dtype":"BF16","shape":[4]},)"
                  R"("c":{"data_offsets":[32,32],"dtype":"U8","shape":[0,7]},)"
                  R"("d":{"data_offsets":[32,40],"dtype":"I64","shape":[]}})",
                  40);
  const std::string other =
      Safetensors(R"({"z":{"data_offsets":[0,2],"dtype":"F16","shape":[1]}})", 2);
  corpus.Add("safetensors", "file", whole);
  corpus.Add("safetensors", "one", other);
  corpus.Add("safetensors", "empty", Safetensors("{}", 0));
  const auto folder = [](const std::string& config, const std::string& index,
                         const std::string& first, const std::string& second) {
    std::string out = "\xff";
    for (const std::string& text : {config, index, first}) {
      out += static_cast<char>(text.size() & 0xFF);
      out += static_cast<char>(text.size() >> 8);
      out += text;
    }
    return out + second;
  };
  corpus.Add("safetensors", "folder", folder(R"({"tie_word_embeddings":true})", "", whole, ""));
  corpus.Add("safetensors", "sharded",
             folder("{}",
                    R"({"metadata":{"total_size":42},"weight_map":{"a":"model.safetensors",)"
                    R"("b":"model.safetensors","c":"model.safetensors","d":"model.safetensors",)"
                    R"("z":"model-2.safetensors"}})",
                    whole, other));
}

// --- configs ---

void AddConfigs(const Corpus& corpus) {
  const std::string llama =
      R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","attention_bias":false,)"
      R"("bos_token_id":1,"eos_token_id":[2,3],"head_dim":8,"hidden_act":"silu","hidden_size":24,)"
      R"("intermediate_size":52,"max_position_embeddings":128,"mlp_bias":false,)"
      R"("num_attention_heads":3,"num_hidden_layers":2,"num_key_value_heads":1,)"
      R"("rms_norm_eps":1e-05,"rope_theta":10000.0,"tie_word_embeddings":true,)"
      R"("torch_dtype":"bfloat16","vocab_size":40,"rope_scaling":{"rope_type":"llama3",)"
      R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
      R"("original_max_position_embeddings":64}})";
  corpus.Add("config", "llama", llama);
  corpus.Add("config", "generation",
             llama + std::string(1, '\0') + R"({"eos_token_id":2,"temperature":0.6})");
  corpus.Add("config", "experts",
             R"({"model_type":"mixtral","text_config":{"vocab_size":40,"num_local_experts":4}})");
}

}  // namespace
}  // namespace stockpot::fuzz

int main(int argc, char** argv) {
  using namespace stockpot::fuzz;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const Corpus corpus(argv[1]);
  AddManifests(corpus);
  AddPacks(corpus);
  AddRecords(corpus);
  AddSafetensors(corpus);
  AddConfigs(corpus);
  return 0;
}
