{{/* What router and worker pods share. All take (dict "root" $ "component" …). */}}

{{- define "millrace.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "millrace.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "millrace.initModel" -}}
{{- with .Values.model.init }}
{{- if .image }}
initContainers:
  - name: model
    image: {{ .image }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- with .command }}
    command: {{ toJson . }}
    {{- end }}
    {{- include "millrace.containerSecurity" $ | nindent 4 }}
    # What a pod may store is the larger of its init containers' limit and the sum of the others': the model counts.
    resources:
      requests: {cpu: 100m, memory: 512Mi, ephemeral-storage: {{ .size }}}
      limits: {memory: 512Mi, ephemeral-storage: {{ .size }}}
    volumeMounts:
      - {name: model, mountPath: /model}
{{- end }}
{{- end }}
{{- end }}

{{- define "millrace.modelMount" -}}
- name: model
  mountPath: /model
  readOnly: true
  {{- with .Values.model.claim.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}

{{- define "millrace.modelVolume" -}}
- name: model
  {{- if .Values.model.claim.name }}
  persistentVolumeClaim: {claimName: {{ .Values.model.claim.name }}, readOnly: true}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.init.size }}}
  {{- end }}
{{- end }}

{{/* A Secret's files, which follow the Secret: (dict "name" volume "secret" its name). Mounted whole, as a subPath would not follow. */}}
{{- define "millrace.secretMount" -}}
{{- if .secret }}
- {name: {{ .name }}, mountPath: /run/millrace/{{ .name }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "millrace.secretVolume" -}}
{{- if .secret }}
- name: {{ .name }}
  secret: {secretName: {{ .secret }}, defaultMode: 0444}
{{- end }}
{{- end }}

{{/* (dict "name" volume "secret" its name "prefix" of the flags "ca" whether peers are checked) */}}
{{- define "millrace.tlsFlags" -}}
{{- if .secret }}
- --{{ .prefix }}_certificate=/run/millrace/{{ .name }}/tls.crt
- --{{ .prefix }}_key=/run/millrace/{{ .name }}/tls.key
{{- if .ca }}
- --{{ .prefix }}_ca=/run/millrace/{{ .name }}/ca.crt
{{- end }}
{{- end }}
{{- end }}

{{/* Alive is the process itself; ready is what the named service says. (dict "port" … "service" … "startupSeconds" …) */}}
{{- define "millrace.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
livenessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ .port }}, service: {{ .service }}}
  periodSeconds: 1
  timeoutSeconds: 1
  failureThreshold: 2
{{- end }}

{{/* Kubernetes takes a pod out of its services while it tells it to stop; the pause lets that be known before new calls are
refused. The image has no shell to sleep in, and the sleep action is there from 1.30 on. */}}
{{- define "millrace.preStop" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
lifecycle:
  preStop:
    sleep: {seconds: 5}
{{- end }}
{{- end }}

{{- define "millrace.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "millrace.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Helm reads every number as a float, which would print 1000000 as 1e+06. */}}
{{- define "millrace.flags" -}}
{{- range $name, $value := . }}
{{- $text := toString $value }}
{{- if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ $text = printf "%.0f" $value }}{{ end }}{{ end }}
- {{ printf "--%s=%s" $name $text | quote }}
{{- end }}
{{- end }}
