// What Python calls; 0 says that all went well. Each of them is a loop over a few hundred seeds.
//
// It is compiled without contraction of floating point, so that sums and products are torch's to
// the bit.

#include "observe.h"
#include "governor.h"
#include "pass.h"

extern "C" {

int esper_step_act(const esper::StepSpec* spec, esper::ActCall* call) {
  esper::act(*spec, *call);
  return 0;
}

int esper_step_check(const esper::CheckCall* call) {
  esper::check(*call);
  return 0;
}

int esper_step_pass(const esper::StepSpec* spec, const esper::PassCall* call) {
  esper::pass_time(*spec, *call);
  return 0;
}

int esper_step_observe(const esper::StepSpec* spec, const esper::ObserveCall* call) {
  esper::observe(*spec, *call);
  return 0;
}

}  // extern "C"
