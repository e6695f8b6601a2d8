{{- define "millrace.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* What selects pods: never changes during the life of a release. (dict "root" $ "component" "router") */}}
{{- define "millrace.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "millrace.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* HOST:PORT of every worker, or the name that stands for them all. */}}
{{- define "millrace.workers" -}}
{{- $service := printf "%s-worker" (include "millrace.fullname" .) }}
{{- $port := int .Values.worker.port }}
{{- if eq .Values.worker.discovery "dns" }}
{{- printf "dns:///%s:%d" $service $port }}
{{- else }}
{{- $addresses := list }}
{{- range until (int .Values.worker.replicas) }}
{{- $addresses = append $addresses (printf "%s-%d.%s:%d" $service . $service $port) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}
{{- end }}

{{/* Refusals that a schema cannot express. */}}
{{- define "millrace.check" -}}
{{- $tls := .Values.tls }}
{{- if and (not .Values.plaintext) (not (and $tls.router.existingSecret $tls.workers.existingSecret $tls.worker.existingSecret)) }}
{{- fail "plaintext is false and not all of tls.router, tls.workers and tls.worker name a Secret. In plaintext, without authentication, whoever reaches their ports can read prompts and command the workers. Set plaintext=true if the network between the pods and their clients is trusted." }}
{{- end }}
{{- if ne (empty $tls.workers.existingSecret) (empty $tls.worker.existingSecret) }}
{{- fail "tls.workers and tls.worker are the two ends of one connection: both must name a Secret, or neither" }}
{{- end }}
{{- if and .Values.tokens.existingSecret (not $tls.router.existingSecret) }}
{{- fail "tokens.existingSecret needs tls.router.existingSecret: a token in plaintext is whoever's who listens" }}
{{- end }}
{{- if and .Values.tokens.existingSecret (not .Values.tokens.clients) (not .Values.tokens.admin) }}
{{- fail "tokens.existingSecret is set and neither tokens.clients nor tokens.admin names a key of it" }}
{{- end }}
{{- if not .Values.model.name }}{{ fail "model.name is empty; it must be what clients call the model" }}{{ end }}
{{- if eq (empty .Values.model.claim.name) (empty .Values.model.init.image) }}
{{- fail "exactly one of model.claim.name and model.init.image must be set" }}
{{- end }}
{{- if and .Values.worker.autoscaling.enabled (ne .Values.worker.discovery "dns") }}
{{- fail "worker.autoscaling.enabled needs worker.discovery=dns: with static the router knows only the workers there were at install" }}
{{- end }}
{{- end }}

{{/* "true" or "": (dict "root" $ "value" auto|true|false) for an API of the Prometheus operator */}}
{{- define "millrace.wanted" -}}
{{- if eq (toString .value) "auto" }}{{ if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- else if eq (toString .value) "true" }}true{{ end }}
{{- end }}
