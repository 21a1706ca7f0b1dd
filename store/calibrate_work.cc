// The part of JobWork that gives a variant better scales before the gate sees it.
#include <utility>

#include "store/calibration.h"
#include "store/distillation_state.h"
#include "store/job_work.h"
#include "store/scoring.h"

namespace stockpot {

Result<Manifest> JobWork::Calibrate(const Job& job, const PublishRequest& request, Manifest draft,
                                    const ProgressFunction& progress) {
  // Nobody asked for it: where it cannot be, nothing is said of it.
  const bool by_itself = request.options.alpha == AlphaMethod::kAuto;
  const AlphaMethod method = by_itself ? AlphaMethod::kClosedForm : request.options.alpha;
  if (method == AlphaMethod::kMean) return draft;
  if (by_itself && request.codec != PublishCodec::kBitDelta) return draft;
  const auto as_it_is = [&](const std::string& why) -> Manifest {
    return by_itself ? std::move(draft) : WithoutCalibration(std::move(draft), method, why);
  };
  if (request.source.run.empty()) return as_it_is("it is of no run, so there are no texts");
  STOCKPOT_ASSIGN_OR_RETURN(const auto texts, store_.GetCalibration(request.source.run));
  if (!texts) return as_it_is("the run has no calibration texts: `stockpot calibration set`");
  if (calibrate_ == nullptr) return as_it_is("no model is served here");
  STOCKPOT_ASSIGN_OR_RETURN(const Manifest base, store_.GetManifest(*draft.base));
  const Manifest full = DenseVariantOf(request.source, base);
  CalibrationRequest asked{
      .base = *draft.base, .full = &full, .draft = &draft, .texts = {}, .method = method};
  for (const ProbeSet::Text& text : texts->texts) asked.texts.push_back(text.text);

  const Digest distilled = Sha256(draft.digest().Hex() + texts->digest().Hex());
  std::optional<DistillationState> state;
  if (const std::optional<Manifest> saved = store_.GetDraft(job.key)) {
    state = ReadDistillation(store_, *saved, distilled);
  }
  if (state) asked.resume = &*state;
  asked.save = [&](const DistillationState& now) -> Status {
    DraftChange change{.job = job.key, .made = {}};
    STOCKPOT_ASSIGN_OR_RETURN(change.made, PutDistillation(store_, now, request.source, distilled));
    Commit commit;
    commit.drafts.push_back(std::move(change));
    leftovers_ = true;
    return store_.Apply(std::move(commit)).status();
  };
  const Result<Calibration> found = calibrate_(asked, progress);
  if (found.ok()) return WithCalibration(store_, std::move(draft), *found, texts->digest());
  const StatusCode code = found.status().code();
  if (code == StatusCode::kInvalidArgument || code == StatusCode::kNotFound) {
    return WithoutCalibration(std::move(draft), method, found.status().message());
  }
  return found.status().WithContext("calibrating");
}

}  // namespace stockpot
