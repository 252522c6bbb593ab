{{- define "name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "addresses" -}}
{{- $root := . -}}
{{- $most := ternary (int .Values.autoscaling.maxReplicas) (int .Values.worker.replicas) .Values.autoscaling.enabled -}}
{{- $list := list -}}
{{- range $n := until $most -}}
{{- $list = append $list (printf "%s-worker-%d.%s-worker.%s.svc:%d" (include "name" $root) $n (include "name" $root) $root.Release.Namespace (int $root.Values.worker.port)) -}}
{{- end -}}
{{ join "," $list }}
{{- end }}

{{- define "useSecret" -}}
{{- if or .Values.workerSecret (not .Values.tlsSecret) }}yes{{ end -}}
{{- end }}

{{- define "workerSecret" -}}
{{- .Values.workerSecret | default (printf "%s-worker-port" (include "name" .)) -}}
{{- end }}

{{- define "security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "flags" -}}
- {{ printf "--model=%s" .Values.model | quote }}
{{- with .Values.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- if .Values.tokenSecret }}
- --token-file=/run/secrets/hub/token
{{- end }}
- --log-format={{ .Values.logFormat }}
{{- if .Values.tracing }}
- --tracing=on
{{- end }}
{{- end }}

{{- define "environment" -}}
{{- if or .Values.tracing .Values.env }}
env:
  {{- with .Values.tracing }}
  - {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- range .Values.env }}
  - {{ toJson . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "scheme" -}}
{{- $encrypted := not (empty .Values.router.tlsSecret) -}}
{{- range .Values.router.arguments }}{{ if hasPrefix "--tls-cert" . }}{{ $encrypted = true }}{{ end }}{{ end -}}
{{- ternary "HTTPS" "HTTP" $encrypted -}}
{{- end }}
