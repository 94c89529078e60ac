// Functions that Python calls; they return 0 on success. Each loops over a few hundred seeds.
//
// This part is compiled without floating-point contraction, so that sums and products are bitwise equal
// to those of torch.

#include "guarded.h"
#include "observe.h"
#include "governor.h"
#include "pass.h"

extern "C" {

int esper_step_act(const esper::step::StepSpec* spec, esper::step::ActCall* call) {
  esper::step::act(*spec, *call);
  return 0;
}

int esper_step_check(const esper::step::CheckCall* call) {
  esper::step::check(*call);
  return 0;
}

int esper_step_pass(const esper::step::StepSpec* spec, const esper::step::PassCall* call) {
  esper::step::advance_lifecycle(*spec, *call);
  return 0;
}

int esper_step_observe(const esper::step::StepSpec* spec, const esper::step::ObserveCall* call) {
  try {
    esper::step::observe(*spec, *call);
  } catch (const esper::step::OtherFeatures&) {
    return esper::kOtherFeatures;
  }
  return esper::kDone;
}

}  // extern "C"
