// What the HTTP side needs of a model that is ready to answer. Made by the composition root once a
// base is loaded; shared by the requests that use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "serve/engine/engine.h"
#include "serve/http/text_assets.h"
#include "serve/variants/router.h"
#include "serve/variants/variant_cache.h"

namespace stockpot {

// The referred objects must outlive the HttpServer it was given to.
struct ServingModel {
  std::string base_name;
  std::shared_ptr<const BaseModel> base;
  Engine& engine;
  const Router& router;
  VariantCache& cache;
  TextAssetsCache& text;
};

}  // namespace stockpot
