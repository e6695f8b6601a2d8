#include "router/api/wire.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/empty.pb.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

constexpr size_t kMaxStatusBytes = 1024;  // a status travels in a header

// The first string field of `fields`, read as a `type`, that is not UTF-8; empty if all are. As deep as the schema:
// ours have no recursive message.
std::string FindInvalidUtf8(const Descriptor& type, const UnknownFieldSet& fields, const std::string& prefix) {
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& field = fields.field(i);
    const FieldDescriptor* const known = type.FindFieldByNumber(field.number());
    if (known == nullptr || field.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    const std::string& bytes = field.length_delimited();
    const std::string name = absl::StrCat(prefix, known->name());
    if (known->type() == FieldDescriptor::TYPE_STRING) {
      const size_t offset = FirstInvalidUtf8(bytes);
      if (offset < bytes.size()) return absl::StrCat(name, " is not UTF-8 at byte ", offset, " of ", bytes.size());
    } else if (known->type() == FieldDescriptor::TYPE_MESSAGE) {
      UnknownFieldSet inner;
      if (!inner.ParseFromString(bytes)) continue;
      std::string found = FindInvalidUtf8(*known->message_type(), inner, name + ".");
      if (!found.empty()) return found;
    }
  }
  return "";
}

}  // namespace

absl::Status ParseMessage(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  {
    grpc::ByteBuffer source = bytes;  // shares the slices; a reader wants one it may change
    grpc::ProtoBufferReader reader(&source);
    if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  }
  const std::string& name = message->GetDescriptor()->full_name();
  grpc::ByteBuffer source = bytes;
  grpc::ProtoBufferReader reader(&source);
  google::protobuf::Empty any;
  if (reader.status().ok() && any.ParseFromZeroCopyStream(&reader)) {
    const std::string found =
        FindInvalidUtf8(*message->GetDescriptor(), any.GetReflection()->GetUnknownFields(any), "");
    if (!found.empty()) return absl::InvalidArgumentError(absl::StrCat(name, ": ", found));
  }
  return absl::InvalidArgumentError(absl::StrCat("the ", bytes.Length(), " bytes of the request are not a ", name));
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &bytes, &own_buffer);
  if (!status.ok()) bytes.Clear();
  return bytes;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kMaxStatusBytes) {
    message.resize(kMaxStatusBytes);
    message += "…";
  }
  return {static_cast<grpc::StatusCode>(status.code()), message};
}

}  // namespace millrace
