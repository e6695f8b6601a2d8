// gRPC's own messages as lines of our log: the same one once a minute, for a peer can cause as many as it likes (a
// handshake that fails is one). Called once, before gRPC is used.
#pragma once

namespace millrace {

void TakeGrpcLog();

}  // namespace millrace
