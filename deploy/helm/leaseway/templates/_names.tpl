{{- define "leaseway.name" -}}
{{- if contains "leaseway" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-leaseway{{ end -}}
{{- end -}}

{{- define "leaseway.selector" -}}
app.kubernetes.io/name: leaseway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "leaseway.labels" -}}
{{ include "leaseway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "leaseway.secret" -}}
{{ .Values.secret.existing | default (include "leaseway.name" .) }}
{{- end -}}
