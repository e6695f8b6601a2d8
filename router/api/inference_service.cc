#include "router/api/inference_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "router/api/choices.h"
#include "router/api/generate_call.h"
#include "router/api/sequence_specs.h"
#include "router/api/validate.h"
#include "router/api/wire.h"
#include "router/fleet/clock.h"

namespace millrace {
namespace {

// A call that never began.
class RefusedCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit RefusedCall(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

std::string DrawRequestId() {
  return absl::StrCat(absl::Hex(RandomBits(), absl::kZeroPad16), absl::Hex(RandomBits(), absl::kZeroPad16));
}

}  // namespace

absl::StatusOr<GenerateCall*> InferenceService::BeginGenerate(const grpc::CallbackServerContext& context,
                                                              const grpc::ByteBuffer& bytes, Time arrived,
                                                              RequestTrace& trace) {
  if (!bytes.Valid()) return absl::CancelledError("the call ended before its request had come");
  const absl::StatusOr<std::string> tenant = access_->TenantOf(context);
  if (!tenant.ok()) return tenant.status();
  v1::GenerateRequest request;
  absl::Status status = registry_->CheckRoom();
  if (status.ok()) status = ParseMessage(bytes, &request);
  if (!tenant->empty()) request.set_tenant(*tenant);
  if (status.ok()) status = Validate(request);
  if (status.ok()) status = model_->CheckName(request.model());
  if (!status.ok()) return status;
  const std::optional<worker::v1::Model> model = fleet_->model();
  if (!model.has_value()) return absl::UnavailableError("no worker has joined yet");
  status = ValidateTokenIds(request, model->vocab_size());
  if (!status.ok()) return status;

  absl::StatusOr<std::vector<int32_t>> prompt = model_->EncodePrompt(request);
  if (!prompt.ok()) return prompt.status();
  const uint64_t seed = request.sampling().has_seed() ? request.sampling().seed() : RandomBits();
  absl::StatusOr<std::vector<SequenceSpec>> specs = MakeSpecs(
      request, *std::move(prompt), {&*model, fleet_->max_sequence_tokens(), seed, FromSystemTime(context.deadline())});
  if (!specs.ok()) return specs.status();

  const std::string request_id = request.request_id().empty() ? DrawRequestId() : request.request_id();
  trace.Describe(request, request_id, model_->name());
  for (SequenceSpec& spec : *specs) spec.traceparent = trace.ForWorkers();
  absl::StatusOr<Choices> choices = MakeChoices(request, *std::move(specs), request_id, model_->tokenizer());
  if (!choices.ok()) return choices.status();
  auto call =
      std::make_shared<GenerateCall>(fleet_, registry_, metrics_, request_id, std::move(choices->streams), arrived);
  status = registry_->Add(request_id, call);
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<SequenceId>> sequences = fleet_->Submit(std::move(choices->specs), call);
  if (!sequences.ok()) {
    registry_->Remove(request_id);
    return sequences.status();
  }
  call->Begin(*std::move(sequences), std::move(trace));
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* InferenceService::Generate(grpc::CallbackServerContext* context,
                                                                       const grpc::ByteBuffer* request) {
  const Time arrived = MonotonicNow();
  RequestTrace trace(spans_, TraceparentOf(*context));
  const absl::StatusOr<GenerateCall*> call = BeginGenerate(*context, *request, arrived, trace);
  if (call.ok()) return *call;
  CallRecord::Refused(metrics_, std::move(trace), static_cast<grpc::StatusCode>(call.status().code()), arrived,
                      MonotonicNow());
  if (const absl::optional<absl::Cord> wait = call.status().GetPayload(kRetryAfterMs)) {
    context->AddTrailingMetadata("grpc-retry-pushback-ms", std::string(*wait));  // gRPC's own clients know it
  }
  return new RefusedCall(call.status());
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::TokenizeRequest, v1::TokenizeResponse>(
      context, *request, response, [this](const v1::TokenizeRequest& in, v1::TokenizeResponse* out) -> absl::Status {
        absl::Status status = Validate(in);
        if (status.ok()) status = model_->CheckName(in.model());
        if (!status.ok()) return status;
        const absl::StatusOr<std::vector<int32_t>> ids = model_->tokenizer().Encode(
            in.text(), {.add_special_tokens = in.add_special_tokens(), .special_as_text = in.special_as_text()});
        if (ids.ok()) out->mutable_token_ids()->Add(ids->begin(), ids->end());
        return ids.status();
      });
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::DetokenizeRequest, v1::DetokenizeResponse>(
      context, *request, response,
      [this](const v1::DetokenizeRequest& in, v1::DetokenizeResponse* out) -> absl::Status {
        absl::Status status = Validate(in);
        if (status.ok()) status = model_->CheckName(in.model());
        if (status.ok()) out->set_text(model_->tokenizer().Decode(in.token_ids(), in.skip_special_tokens()));
        return status;
      });
}

grpc::ServerUnaryReactor* InferenceService::RenderChat(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::RenderChatRequest, v1::RenderChatResponse>(
      context, *request, response,
      [this](const v1::RenderChatRequest& in, v1::RenderChatResponse* out) -> absl::Status {
        absl::Status status = Validate(in);
        if (status.ok()) status = model_->CheckName(in.model());
        if (!status.ok()) return status;
        const absl::StatusOr<std::vector<Tokenizer::Piece>> pieces = model_->Render(in.chat());
        if (!pieces.ok()) return pieces.status();
        for (const Tokenizer::Piece& piece : *pieces) out->mutable_text()->append(piece.text);
        const absl::StatusOr<std::vector<int32_t>> ids = model_->tokenizer().EncodePieces(*pieces);
        if (ids.ok()) out->mutable_token_ids()->Add(ids->begin(), ids->end());
        return ids.status();
      });
}

grpc::ServerUnaryReactor* InferenceService::ListModels(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::ListModelsRequest, v1::ListModelsResponse>(
      context, *request, response, [this](const v1::ListModelsRequest&, v1::ListModelsResponse* out) {
        v1::ModelInfo* const info = out->add_models();
        info->set_name(model_->name());
        info->set_has_chat_template(model_->has_chat_template());
        info->set_num_workers(fleet_->num_ready_workers());
        if (const std::optional<worker::v1::Model> model = fleet_->model()) {
          info->set_vocab_size(model->vocab_size());
          info->set_max_context(model->max_context());
          info->mutable_eos_token_ids()->CopyFrom(model->eos_token_ids());
        }
        return absl::OkStatus();
      });
}

}  // namespace millrace
