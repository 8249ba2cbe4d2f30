{{- define "metamq.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "metamq.labels" -}}
app.kubernetes.io/name: metamq
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The addresses of all servers of ZooKeeper. */}}
{{- define "metamq.servers" -}}
{{- $name := printf "%s-zookeeper" (include "metamq.name" .) -}}
{{- $servers := list -}}
{{- range $number := until (int .Values.zookeeper.replicas) -}}
{{- $servers = append $servers (printf "%s-%d.%s" $name $number $name) -}}
{{- end -}}
{{- join "," $servers -}}
{{- end }}

{{/* A program gets no rights, and writes to its volume and /tmp only. */}}
{{- define "metamq.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 8123
  runAsGroup: 8123
  fsGroup: 8123
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- if .root.Values.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
{{- end }}
{{- end }}

{{- define "metamq.container" -}}
image: {{ .Values.image | quote }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
{{- end }}

{{- define "metamq.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if . }}
- name: certificates
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "metamq.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if . }}
- {name: certificates, mountPath: /etc/metamq/security, readOnly: true}
{{- end }}
{{- end }}

{{- define "metamq.claim" -}}
volumeClaimTemplates:
  - metadata: {name: data}
    spec:
      accessModes: ["ReadWriteOnce"]
      {{- with .root.Values.storageClassName }}
      storageClassName: {{ . | quote }}
      {{- end }}
      resources: {requests: {storage: {{ .storage | quote }}}}
{{- end }}

{{/* A value as text. Helm reads numbers as floats, and would write large ones with an exponent. */}}
{{- define "metamq.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{- define "metamq.check" -}}
{{- $given := compact (list .Values.security.brokers .Values.security.zookeeper) -}}
{{- if .Values.console.enabled -}}
{{- $given = compact (append $given .Values.security.console) -}}
{{- end -}}
{{- if not (has (len $given) (list 0 (ternary 3 2 .Values.console.enabled))) -}}
{{- fail "security: give the Secrets of brokers, zookeeper and (if it is enabled) console, or none of them" -}}
{{- end -}}
{{- end }}
